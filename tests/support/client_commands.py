"""The commands by which clients are run: those of the tests are those of docs/clients.md, with other places in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """The fields of ``PAGE`` are how the page calls them."""

    url: str  # of the gateway
    model: str  # folder of the model
    out: str  # folder for what clients write
    trace: str = ""  # a trace in Mooncake's format


PAGE = Places("http://127.0.0.1:8000", "$MODEL", "out", "out/trace.jsonl")
TRACE = (  # so slow that requests seldom wait for one another: then both measure the server, not its queue
    "requests=20", "sessions_per_s=0.15", "system_tokens=160", "question_tokens=60", "tool_tokens=50", "output_tokens=10",
    "output_least=8", "output_most=12", "max_prompt=600", "tool_gap_s=3.0", "user_gap_s=6.0",
)  # fmt: skip


def program(name: str, at: Places) -> list[str]:
    """A program of tests/clients/programs, for clients that are libraries."""
    return ["python", f"tests/clients/programs/{name}.py", at.url, at.model]


def lm_eval(at: Places) -> list[str]:
    return [
        "lm_eval", "--model", "local-completions", "--include_path", "tests/clients/tasks",
        "--tasks", "moonpool_choices,moonpool_answers",
        "--model_args", f"model=smollm2,base_url={at.url}/v1/completions,tokenizer={at.model},max_length=1024",
        "--batch_size", "2", "--output_path", f"{at.out}/lm-eval", "--log_samples",
    ]  # fmt: skip


def aiperf_synthetic(at: Places) -> list[str]:
    return [
        "aiperf", "profile", "--model", "smollm2", "--url", at.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", "local/smollm2", "--synthetic-input-tokens-mean", "150", "--output-tokens-mean", "12",
        "--request-count", "8", "--concurrency", "2", "--random-seed", "1", "--apply-chat-template",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--output-artifact-dir", f"{at.out}/aiperf-synthetic",
    ]  # fmt: skip


def aiperf_replay(at: Places, run: str = "aiperf-replay", seed: int = 1) -> list[str]:
    return [
        "aiperf", "profile", "--model", "smollm2", "--url", at.url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", "local/smollm2", "--input-file", at.trace, "--custom-dataset-type", "mooncake_trace",
        "--isl-block-size", "64", "--fixed-schedule", "--random-seed", str(seed), "--use-legacy-max-tokens",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--ui", "none",
        "--output-artifact-dir", f"{at.out}/{run}",
    ]  # fmt: skip


def guidellm_constant(at: Places) -> list[str]:
    return [
        "guidellm", "run", "--backend", f"kind=openai_http,target={at.url},model=smollm2",
        "--profile", "kind=constant,rate=1", "--constraint", "kind=max_requests,count=8",
        "--data", "kind=synthetic_text,prompt_tokens=96,output_tokens=12",
        "--tokenizer", f"kind=huggingface_auto,model={at.model}",
        "--output", f"kind=json,path={at.out}/guidellm-constant.json", "--disable-console-interactive",
    ]  # fmt: skip


def guidellm_replay(at: Places) -> list[str]:
    return [
        "guidellm", "run", "--backend", f"kind=openai_http,target={at.url},model=smollm2,request_format=/v1/completions",
        "--profile", "kind=replay",
        "--data", f"kind=mooncake,source.kind=json_file,source.path={at.trace},hash_id_block_size=64,time_scale=0.001",
        "--tokenizer", f"kind=huggingface_auto,model={at.model}",
        "--output", f"kind=json,path={at.out}/guidellm-replay.json", "--disable-console-interactive",
    ]  # fmt: skip


def vllm_bench(at: Places) -> list[str]:
    return [
        "python", "tests/clients/programs/vllm_bench.py", "--backend", "openai", "--base-url", at.url,
        "--endpoint", "/v1/completions", "--model", "smollm2", "--tokenizer", at.model, "--dataset-name", "random",
        "--random-input-len", "96", "--random-output-len", "12", "--num-prompts", "8", "--request-rate", "2",
        "--ignore-eos", "--seed", "1", "--disable-tqdm", "--save-result", "--result-dir", at.out,
        "--result-filename", "vllm-bench.json",
    ]  # fmt: skip


def moonpool_trace(at: Places) -> list[str]:
    settings = [part for value in TRACE for part in ("--set", value)]
    return ["moonpool", "trace", "generate", at.trace, "--seed", "19", *settings]


def moonpool_replay(at: Places, run: str = "moonpool-replay", salt: int = 0) -> list[str]:
    return [
        "moonpool", "replay", at.trace, "--url", at.url, "--trace-block-tokens", "64", "--salt", str(salt),
        "--report", f"{at.out}/{run}",
    ]  # fmt: skip


def on_page() -> list[list[str]]:
    """Every command that the page may show."""
    programs = [program(name, PAGE) for name in ("openai_calls", "litellm_calls", "langchain_calls")]
    others = [
        lm_eval, aiperf_synthetic, aiperf_replay, guidellm_constant, guidellm_replay, vllm_bench, moonpool_trace,
        moonpool_replay,
    ]  # fmt: skip
    return [*programs, *(make(PAGE) for make in others)]
