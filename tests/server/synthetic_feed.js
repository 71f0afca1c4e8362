// Instead of the server's stream: 10,000 blocks of which 600 change 15 times a second, and six copies each time.
window.fed = 0; window.frames_ = [];
const real = window.fetch, N = 10000, cells = new Uint32Array(N);
const figures = {free: 0, cached: 0, active: 0, shared: 0, pinned: 0, host_used: 0, tokens_stored: 9, tokens_apart: 9,
  utilisation: 0.9, running: 40, sequences: 90, waiting: 3, swapped: 0, steps: 3, prefill_rate: 100, decode_rate: 900,
  step_seconds: 0.02, paged: 6000, contiguous_own: 20000, contiguous_model: 40000, copies: 0, evictions: 0, swapped_out: 0,
  swapped_in: 0, recomputed: 0, swap_preempted: 0, hit_tokens: 0, lookup_tokens: 0};
const row = i => ({id: `request-${i}`, state: "running", kind: "sampling", prompt_tokens: 90, cached_tokens: 0, prefill_done: 90,
  prefill_of: 90, output_tokens: fed % 300, most_tokens: 300, sequences: 3, logical_blocks: 30, blocks: 20, shared_blocks: 5, preemptions: 0});
const cell = () => { const state = 1 + Math.floor(Math.random() * 4); return state | (1 + Math.floor(Math.random() * 16)) << 8 | 3 << 16; };
window.fetch = (path, options) => {
  if (String(path).startsWith("memory/requests")) return Promise.resolve(new Response(null, {status: 204}));
  if (String(path) !== "memory/events") return real(path, options);
  for (let i = 0; i < N; i++) cells[i] = cell();
  const base = () => ({number: fed++, time: performance.now() / 1000, figures, requests: Array.from({length: 32}, (_, i) => row(i)), more_requests: 8});
  const code = text => new TextEncoder().encode(text);
  return Promise.resolve(new Response(new ReadableStream({start(out) {
    const geometry = {num_blocks: N, num_host_blocks: 0, block_size: 16, block_bytes: 368640, max_model_len: 2048, max_num_seqs: 256, token_budget: 2048, prefix_caching: true};
    let packed = ""; new Uint8Array(cells.buffer).forEach(b => packed += String.fromCharCode(b));
    out.enqueue(code(`event: snapshot\ndata: ${JSON.stringify({...base(), geometry, cells: btoa(packed), host: ""})}\n\n`));
    setInterval(() => {
      const changed = [], events = [];
      for (let i = 0; i < 600; i++) changed.push(Math.floor(Math.random() * N), cell());
      for (let i = 0; i < 6; i++) events.push({type: "copy", source: Math.floor(Math.random() * N), target: Math.floor(Math.random() * N), request: "request-1", sequence: 1});
      out.enqueue(code(`event: delta\ndata: ${JSON.stringify({...base(), cells: changed, host: [], events, dropped: 0})}\n\n`));
    }, 67);
  }})));
};
requestAnimationFrame(function note(t) { frames_.push(t); requestAnimationFrame(note); });
