"""examples/generate.py: every answer is the one that the model gives to this prompt alone, with no cache."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPE = "float32" if jax.default_backend() == "cpu" else "bfloat16"
GERMANY, LONG = "What is the capital of Germany?", "Count the dogs here." + " The quick brown fox jumps over the lazy dog." * 9

# Prompts and the most tokens of their answers: more than there are slots, and together more than the cache holds.
PROMPTS = {GERMANY: 20, LONG: 9, "Hi": 3, "Name three fruits.": 16, "Write a haiku.": 16, "Say yes.": 1}
SIZES = {"slots": 3, "num_blocks": 20, "block_size": 8, "context": 160, "chunk": 24}
OPTIONS = ("--slots=3", "--blocks=20", "--block-size=8", "--context=160", "--chunk=24")

# Greedy answers of transformers 5.24 (PyTorch, float32) from the same file.
EXPECTED = {
    GERMANY: "The capital of Germany is Berlin.<|im_end|>",
    LONG: "The quick brown fox jumps over the lazy dog",
    "Hi": "Hello! How",
    "Name three fruits.": "1. Bananas\n2. Oranges\n3. Grapes<|im_end|>",
    "Write a haiku.": "In the heart of the night, a moon that shines with a silver light,",
    "Say yes.": "I",
}

# Its tokens of the prompt "Hi 123": the system's words, the user's, and the beginning of the answer.
SYSTEM = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198)
USER = (1, 4093, 198, 26843, 216, 33, 34, 35, 2, 198, 1, 520, 9531, 198)

# By how much the logit of a chosen token may be below the largest one of the second implementation (float32). Where an answer
# of bfloat16 leaves that of float32, the two logits are 0.1 apart.
TOLERANCE = {"float32": 0.0, "bfloat16": 0.25}


@pytest.fixture(autouse=True)
def strict():
    """In place of the strict rules of the other tests: the example adds arrays of different ranks as users do."""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate", Path(__file__).parents[1] / "examples" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_model = functools.cache(module.load_model)
    return module


@pytest.fixture(scope="module")
def model(example):
    return example.load_model(DTYPE)


class Run:
    """All prompts served once, with what was seen on the way."""

    def __init__(self, example, model):
        self.traces, attention = 0, example.varlen_attention

        def counted(*args, **options):
            self.traces += 1
            return attention(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(example, "varlen_attention", counted)
            self.server = example.Server(model, **SIZES)
            self.compiled = self.traces
            self.requests = [example.Request(model.encode(prompt), most) for prompt, most in PROMPTS.items()]
            self.pools = pointers(self.server)
            for request in self.requests:
                self.server.submit(request)
            self.order, self.most_running = [], 0
            for request in self.server.serve():
                self.order.append(self.requests.index(request))
                self.most_running = max(self.most_running, len(self.server.running))


def pointers(server):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(server.pools)]


@pytest.fixture(scope="module")
def run(example, model):
    return Run(example, model)


def dense_logits(params, tokens):
    """The second implementation: one sequence, no cache. Only the weights are shared with the example."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float32), params)

    def norm(x, gain):
        return gain * x / np.sqrt(np.mean(np.square(x), 1) + np.float32(1e-5))[:, None]

    def heads(x, weight):  # (heads, tokens, head_dim)
        return np.einsum("ti,hdi->htd", x, weight.reshape(-1, 64, weight.shape[1]), optimize=True)

    def turned(x):  # a pair of neighbours is a complex number
        angles = np.outer(np.arange(len(tokens)), 100000.0 ** -(np.arange(32) / 32))
        return (np.ascontiguousarray(x).view(np.complex64) * np.exp(1j * angles)).astype(np.complex64).view(np.float32)

    x = w["token_embd"][tokens]
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf, np.float32), 1)
    for p in w["layers"]:
        h = norm(x, p["attn_norm"])
        q, k, v = turned(heads(h, p["attn_q"])), turned(heads(h, p["attn_k"])), heads(h, p["attn_v"])
        k, v = np.repeat(k, len(q) // len(k), 0), np.repeat(v, len(q) // len(v), 0)
        s = q @ k.swapaxes(1, 2) / np.float32(8) + future
        s = np.exp(s - s.max(2, keepdims=True))
        mixed = s / s.sum(2, keepdims=True) @ v
        x = x + np.concatenate(mixed, 1) @ p["attn_output"].T
        h = norm(x, p["ffn_norm"])
        gate = h @ p["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["ffn_up"].T)) @ p["ffn_down"].T
    return norm(x, w["output_norm"]) @ w["token_embd"].T


def test_answers_are_those_of_the_dense_model(model, run):
    """Greedy decoding chooses the largest logit of every position, and one pass over prompt and answer has them all."""
    for request in run.requests:
        logits = dense_logits(model.params, request.tokens[:-1])[len(request.prompt) - 1 :]
        chosen = np.take_along_axis(logits, np.array(request.answer)[:, None], 1)[:, 0]
        assert (logits.max(1) - chosen).max() <= TOLERANCE[DTYPE]


def test_answers_are_those_of_its_authors_code(model, run):
    answers = [model.tokenizer.decode(request.answer, skip_special_tokens=False) for request in run.requests]
    assert answers == list(EXPECTED.values())


def test_answers_end_where_the_model_or_the_limit_ends_them(model, run):
    for request, most in zip(run.requests, PROMPTS.values(), strict=True):
        assert model.end not in request.answer[:-1]
        assert len(request.answer) == most or (len(request.answer) < most and request.answer[-1] == model.end)
    assert {request.answer[-1] == model.end for request in run.requests} == {True, False}


def test_sequences_come_and_go_while_others_go_on(run):
    starts = [run.order.index(i) for i in range(len(PROMPTS))]
    ends = [len(run.order) - run.order[::-1].index(i) for i in range(len(PROMPTS))]
    assert run.most_running == SIZES["slots"] < len(PROMPTS)
    assert ends != sorted(ends) and min(ends) < max(starts) < max(ends)


def test_nothing_is_traced_while_serving(model, run):
    assert run.traces == run.compiled == len(run.server.compiled) * len(model.params["layers"])
    with pytest.raises(TypeError, match="int32"):
        run.server.compiled[3](model.params, run.server.pools, *(np.zeros(n, np.int32) for n in (4, 5, 4)), run.server.table)


def test_pools_stay_in_place(run):
    assert pointers(run.server) == run.pools


def test_all_blocks_are_back(run):
    assert sorted(run.server.free) == list(range(SIZES["num_blocks"]))
    assert run.server.preemptions > 0 and run.server.most_blocks == SIZES["num_blocks"]


class Recall:
    """In place of the model: the blocks hold the tokens themselves, and the next one depends on all before."""

    def __init__(self, num_blocks, block_size):
        self.pool = np.full((num_blocks, block_size), -1)

    def __call__(self, params, pools, tokens, cu_seqlens, cached, table):
        following = np.full(len(cached), -1)
        for b, length in enumerate(np.diff(cu_seqlens)):
            for i in range(length):
                block, row = divmod(cached[b] + i, self.pool.shape[1])
                self.pool[table[b, block], row] = tokens[cu_seqlens[b] + i]
            following[b] = next_token(self.pool[table[b]].ravel()[: cached[b] + length].tolist())
        return following, pools


def next_token(tokens):
    return hash(tuple(tokens)) % 13


def alone(prompt, most, end):
    answer = []
    while len(answer) < most and end not in answer:
        answer.append(next_token(prompt + answer))
    return answer


def stub_server(example, num_blocks, block_size, **sizes):
    recall = Recall(num_blocks, block_size)

    class Server(example.Server):
        def compile(self, size):
            return recall

    return Server(example.Model({"layers": []}, None, None, end=0), num_blocks=num_blocks, block_size=block_size, **sizes)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_sizes_give_the_same_answers(example, data):
    size = functools.partial(st.integers, 1)
    prompts = data.draw(st.lists(st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=20), size(12)), max_size=9))
    slots, block_size, chunk = data.draw(st.tuples(size(4), size(5), size(24)))
    longest = max((len(prompt) + most for prompt, most in prompts), default=1)
    num_blocks = data.draw(st.integers(-(-longest // block_size), 32))
    server = stub_server(example, num_blocks, block_size, slots=slots, context=longest, chunk=chunk)
    requests = [example.Request(prompt, most) for prompt, most in prompts]
    for request in requests:
        server.submit(request)
    for _ in server.serve():
        used = [block for request in server.running.values() for block in request.blocks]
        assert sorted(used + server.free) == list(range(num_blocks))
    assert [request.answer for request in requests] == [alone(prompt, most, 0) for prompt, most in prompts]


def test_too_long_a_request_is_refused(example):
    server = stub_server(example, **SIZES | {"context": 50})
    with pytest.raises(ValueError, match="45 tokens with an answer of up to 6 does not fit into 50"):
        server.submit(example.Request([1] * 45, 6))


def test_prompts_are_encoded_as_in_training(model):
    assert model.encode("Hi 123") == [*SYSTEM, *USER]


def test_program_streams_every_answer(example, model, capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"{LONG}\n\n{GERMANY}\n")
    assert example.main([*OPTIONS, "--max-tokens=10", f"--prompts={path}"]) == 0
    printed = capsys.readouterr().out
    assert f"> {GERMANY} (37 tokens)\nThe capital of Germany is Berlin.\n" in printed
    assert printed.index("lazy dog. ...") < printed.index(GERMANY)
    assert "prefill" in printed and "of 20 blocks of 8 tokens" in printed


def test_program_refuses(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--slots=0"])
    assert "at least 1" in capsys.readouterr().err
