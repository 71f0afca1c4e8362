// llama.cpp's logits for token ids, so that its agreement with the float32 reference can be told.
// Arguments: MODEL.gguf THREADS LONGEST (tokens of a prompt).
//
// Reads "count id id ..." from standard input again and again, and answers each with count x vocabulary floats, the
// logits after every token, computed in one batch as a server computes a prompt. First of all it prints the size of
// the vocabulary as an int32. Compiled by quality.py against the peer's own headers and library.
#include <llama.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int longest = std::atoi(argv[3]);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 3;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = static_cast<std::uint32_t>(longest);
  params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 4;
  const std::int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::fwrite(&vocab, sizeof vocab, 1, stdout);
  std::fflush(stdout);

  int count = 0;
  while (std::scanf("%d", &count) == 1 && count > 0 && count <= longest) {
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; ++i) {
      if (std::scanf("%d", &batch.token[i]) != 1) return 5;
      batch.pos[i] = i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    llama_memory_clear(llama_get_memory(context), true);
    if (llama_decode(context, batch) != 0) return 6;
    for (int i = 0; i < count; ++i) {
      std::fwrite(llama_get_logits_ith(context, i), sizeof(float), static_cast<std::size_t>(vocab), stdout);
    }
    std::fflush(stdout);
    llama_batch_free(batch);
  }
  llama_free(context);
  llama_model_free(model);
  return 0;
}
