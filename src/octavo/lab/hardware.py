"""Named GPUs and models at whose scale the lab simulates, with the source of each figure. Knows no strategy.

Figures of GPUs are those that the makers publish. The one machine of our own is there to compare with: its steps were
measured (step_time.SMOLLM2).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import RequestError

MEMORY_SHARE = 0.9  # of a GPU's memory that an engine takes (vLLM's default), weights included
MAX_POOL_SLOTS = 1 << 26  # each block of a simulated pool costs some hundred bytes of this machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One GPU by its data sheet, or a machine whose steps were measured."""

    name: str
    label: str
    memory: int  # bytes
    bandwidth: float  # bytes a second; 0: no figure, steps were measured instead
    flops: float  # 16-bit floating-point operations a second, dense, by tensor cores that add in 32 bits; 0: likewise
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model, by its published configuration."""

    name: str
    label: str
    parameters: int
    weight_bytes: int  # of all parameters, as they are kept
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_element_bytes: int
    max_model_len: int  # tokens
    source: str

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values: 2 x layers x KV heads x head size x bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_element_bytes


_MIB = 2**20


def _gpu(name: str, label: str, mib: int, gigabytes_s: float, teraflops: float, source: str) -> GPU:
    return GPU(
        name=name, label=label, memory=mib * _MIB, bandwidth=gigabytes_s * 1e9, flops=teraflops * 1e12, source=source
    )


def _model(
    name: str, label: str, parameters: int, shape: tuple[int, int, int, int], max_model_len: int, source: str
) -> Model:
    """A model of 16 bits a parameter and a KV element; shape: layers, heads, KV heads, head size."""
    num_layers, num_heads, num_kv_heads, head_dim = shape
    return Model(
        name=name,
        label=label,
        parameters=parameters,
        weight_bytes=2 * parameters,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_element_bytes=2,
        max_model_len=max_model_len,
        source=source,
    )


# Memory as nvidia-smi shows it: what programs can have.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("l4", "NVIDIA L4, 24 GB", 23_034, 300, 121, "NVIDIA L4 data sheet (dense)"),
        _gpu("a10", "NVIDIA A10, 24 GB", 23_028, 600, 125, "NVIDIA A10 data sheet"),
        _gpu("rtx-4090", "GeForce RTX 4090, 24 GB", 24_564, 1008, 165.2, "NVIDIA Ada GPU architecture white paper"),
        _gpu("a100-40g", "NVIDIA A100, 40 GB", 40_960, 1555, 312, "NVIDIA A100 data sheet, 40 GB"),
        _gpu("a100-80g", "NVIDIA A100 SXM, 80 GB", 81_920, 2039, 312, "NVIDIA A100 data sheet, 80 GB SXM"),
        _gpu("h100-80g", "NVIDIA H100 SXM, 80 GB", 81_559, 3350, 989.4, "NVIDIA H100 data sheet, SXM (dense)"),
        # 1 GiB for keys and values, the engine's default, beside SmolLM2's weights
        _gpu("cpu", "2 cores of an Intel Xeon", 1242, 0, 0, "measured by Octavo"),
    )
}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _model(
            "llama-2-7b",
            "Llama 2 7B",
            6_738_415_616,
            (32, 32, 32, 128),
            4096,
            "meta-llama/Llama-2-7b config.json and its tensors' sizes",
        ),
        _model(
            "llama-3.1-8b",
            "Llama 3.1 8B",
            8_030_261_248,
            (32, 32, 8, 128),
            131_072,
            "meta-llama/Llama-3.1-8B config.json and its tensors' sizes",
        ),
        _model(
            "opt-13b",
            "OPT 13B",
            12_853_473_280,
            (40, 40, 40, 128),
            2048,
            "facebook/opt-13b config.json; Kwon et al., SOSP 2023, table 1: 26 GB of parameters, 800 KB a token",
        ),
        _model(
            "llama-3.1-70b",
            "Llama 3.1 70B",
            70_553_706_496,
            (80, 64, 8, 128),
            131_072,
            "meta-llama/Llama-3.1-70B config.json and its tensors' sizes",
        ),
        Model(
            name="smollm2",
            label="SmolLM2 135M, Q4_1",
            parameters=134_515_008,
            weight_bytes=98_362_432,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            kv_element_bytes=2,
            max_model_len=8192,
            source="the file that octavo runs as smollm2; keys and values in bf16",
        ),
    )
}


def gpu(name: str) -> GPU:
    """The GPU of this name. Raises RequestError, with the names there are."""
    if name not in GPUS:
        raise RequestError(f"There are no figures for a GPU {name!r}; there are {', '.join(GPUS)}.")
    return GPUS[name]


def model(name: str) -> Model:
    """The model of this name. Raises RequestError, with the names there are."""
    if name not in MODELS:
        raise RequestError(f"There are no figures for a model {name!r}; there are {', '.join(MODELS)}.")
    return MODELS[name]


def pool_slots(gpu: GPU, model: Model, count: int = 1) -> int:
    """Tokens whose keys and values fit beside the weights in `count` GPUs that share the model out evenly.

    What is left of 0.9 of the memory after the weights; what a step computes with is in the tenth. Raises RequestError
    where the weights leave no room.
    """
    if count < 1:
        raise RequestError(f"count is {count}; there must be at least 1 GPU.")
    memory = int(MEMORY_SHARE * gpu.memory * count)
    slots = (memory - model.weight_bytes) // model.token_bytes
    if slots < 1:
        raise RequestError(
            f"{model.label} needs {model.weight_bytes / 2**30:.1f} GiB for its weights alone; {MEMORY_SHARE:.0%} of "
            f"{count} × {gpu.label} is {memory / 2**30:.1f} GiB. More GPUs, or larger ones, would work."
        )
    if slots > MAX_POOL_SLOTS:
        raise RequestError(
            f"{count} × {gpu.label} has room for {slots:,} tokens of {model.label}; at most {MAX_POOL_SLOTS:,} can be "
            "simulated. Fewer GPUs would work."
        )
    return slots
