"""Sampling that belongs to the request: in any slot, with any mates and padding, the same text, given equal scores.

The judge is a model whose logits are a table: they depend on the last token alone, so that rows cannot influence one another
and whatever differs between two batches is the sampling's doing.
"""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.modeling_outputs import CausalLMOutput

import detlab
from detlab import bits
from detlab.engine.sampling import owned_sampling, request_id, sample_token
from detlab.engine.streams import gumbels
from detlab.errors import UsageError

VOCAB, PAD, EOS = 61, 0, 1


class TableConfig(PretrainedConfig):
    model_type = "table-of-logits"


class Table(PreTrainedModel, GenerationMixin):
    """Logits are a row of a table, chosen by the last token; exact eighths, so that no arithmetic can differ."""

    config_class = TableConfig
    main_input_name = "input_ids"

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(5)
        table = torch.randint(-24, 25, (VOCAB, VOCAB), generator=generator).float() / 8
        table[:, [PAD, EOS]] = -64  # texts do not end by themselves
        self.table = torch.nn.Parameter(table)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        logits = self.table[input_ids] if inputs_embeds is None else inputs_embeds[..., :1].expand(-1, -1, VOCAB)
        return CausalLMOutput(logits=logits)

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **kwargs):
        return {"input_ids": input_ids, "inputs_embeds": inputs_embeds if input_ids.shape[1] == 0 else None}


@pytest.fixture(scope="module")
def table():
    return fresh_table()


def fresh_table() -> Table:
    model = Table(TableConfig(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS)).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS, use_cache=False)
    return model


PROMPTS = [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15, 7], [20], [5, 6, 8], [33, 34, 35, 36]]
NEW = 12


def padded(prompts: list[list[int]], extra: int = 0) -> dict[str, Tensor]:
    width = max(map(len, prompts)) + extra
    ids = [[PAD] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def texts(model, prompts, extra=0, seed=3, ids=None, **options) -> list[list[int]]:
    with owned_sampling(model, seed, ids):
        out = model.generate(**padded(prompts, extra), max_new_tokens=NEW, **{"do_sample": True, **options})
    return out[:, -NEW:].tolist()


def stock_texts(model, prompts, seed=3, **options) -> list[list[int]]:
    torch.manual_seed(seed)
    return model.generate(**padded(prompts), max_new_tokens=NEW, do_sample=True, **options)[:, -NEW:].tolist()


WARPS = [
    {"temperature": 0.6, "top_k": 0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.7},
    {"temperature": 1.0},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "typical_p": 0.8},
    {"top_k": 0, "eta_cutoff": 0.02},
    {"top_k": 0, "epsilon_cutoff": 0.01},
    {"top_k": 0, "top_h": 0.6},
    {"repetition_penalty": 1.3, "renormalize_logits": True},
]


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_a_text_depends_on_neither_slot_nor_mates_nor_padding(table, warp):
    alone = [texts(table, [prompt], **warp)[0] for prompt in PROMPTS]
    assert texts(table, PROMPTS, **warp) == alone
    assert texts(table, PROMPTS[::-1], **warp)[::-1] == alone
    assert texts(table, PROMPTS[2:5], **warp) == alone[2:5]
    if "repetition_penalty" not in warp:  # a penalty sees the padding's token
        assert texts(table, PROMPTS, extra=5, **warp) == alone
    assert len({tuple(text) for text in alone}) == len(PROMPTS)
    assert texts(table, PROMPTS, seed=4, **warp) != alone


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.0])
def test_control_stock_sampling_depends_on_the_slot(table, temperature):
    """Case C9: one generator for the batch. If this stops diverging, the tests above show nothing."""
    alone = [stock_texts(table, [prompt], temperature=temperature)[0] for prompt in PROMPTS]
    batch = stock_texts(table, PROMPTS, temperature=temperature)
    turned = stock_texts(table, PROMPTS[::-1], temperature=temperature)[::-1]
    assert batch != alone and turned != batch and turned != alone


@pytest.mark.parametrize("beams", [2, 3])
def test_sampled_beams_depend_on_neither_slot_nor_mates(table, beams):
    options = {"num_beams": beams, "temperature": 0.8, "top_k": 20, "num_return_sequences": beams}
    alone = [text for prompt in PROMPTS for text in texts(table, [prompt], **options)]
    assert texts(table, PROMPTS, extra=2, **options) == alone
    assert len(set(map(tuple, alone))) > len(PROMPTS)
    stock = [text for prompt in PROMPTS for text in stock_texts(table, [prompt], **options)]
    assert stock_texts(table, PROMPTS, **options) != stock


def test_four_samples_are_four_texts_and_each_is_the_one_drawn_alone(table):
    four = texts(table, PROMPTS, num_return_sequences=4)
    for row, prompt in enumerate(PROMPTS):
        samples = four[4 * row : 4 * row + 4]
        assert len(set(map(tuple, samples))) == 4
        for number, sample in enumerate(samples):
            assert texts(table, [prompt], ids=[request_id(prompt, number)]) == [sample]
        assert texts(table, [prompt]) == samples[:1]


def test_each_token_is_the_gumbel_maximum_of_the_scores_returned(table):
    with owned_sampling(table, 9):
        out = table.generate(
            **padded(PROMPTS[:2]),
            max_new_tokens=5,
            do_sample=True,
            top_k=7,
            temperature=0.7,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert {type(t) for t in (*out.scores, *out.logits, out.sequences)} == {Tensor}
    tokens = out.sequences[:, -5:].tolist()
    for position, scores in enumerate(out.scores):
        warped = TopKLogitsWarper(7)(None, TemperatureLogitsWarper(0.7)(None, out.logits[position]))
        assert bits.equal(scores, warped) and not bits.equal(scores, out.logits[position])
        for row, prompt in enumerate(PROMPTS[:2]):
            sums = scores[row].double().numpy() + gumbels(9, request_id(prompt), position, VOCAB)
            assert tokens[row][position] == int(sums.argmax())
            assert sample_token(scores[row], 9, request_id(prompt), position).item() == int(sums.argmax())


def test_beams_return_plain_tensors(table):
    for do_sample in (False, True):
        with owned_sampling(table, 9):
            out = table.generate(
                **padded(PROMPTS[:2]),
                max_new_tokens=4,
                num_beams=3,
                do_sample=do_sample,
                output_scores=True,
                return_dict_in_generate=True,
            )
        found = [out.sequences, out.sequences_scores, out.beam_indices, *out.scores]
        assert {type(t) for t in found} == {Tensor}


def chi_square(model, temperature: float) -> float:
    """Of 20,000 first tokens against softmax(table / 0.8)."""
    n, prompt = 20_000, [17]
    with owned_sampling(model, 1, [f"draw {i}" for i in range(n)]):
        out = model.generate(**padded([prompt] * n), max_new_tokens=1, do_sample=True, temperature=temperature, top_k=0)
    counts = torch.bincount(out[:, -1], minlength=VOCAB).double()
    expected = n * (model.table[17].detach().double() / 0.8).softmax(-1)
    is_likely = expected >= 5
    pooled = torch.cat([counts[is_likely], counts[~is_likely].sum()[None]])
    of_them = torch.cat([expected[is_likely], expected[~is_likely].sum()[None]])
    statistic = float(((pooled - of_them) ** 2 / of_them.clamp_min(1)).sum())
    # Wilson and Hilferty: the cube root of chi-square / df is close to normal; in standard deviations.
    df = len(pooled) - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5


def test_tokens_are_drawn_from_the_softmax(table):
    assert abs(chi_square(table, 0.8)) < 3.3
    assert chi_square(table, 0.85) > 3.3  # control: a temperature that is a little off is noticed


def test_several_positions_of_one_request_are_drawn_from_the_softmax_too():
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0, -torch.inf], dtype=torch.float64)
    n = 20_000
    drawn = sample_token(scores.expand(n, 5), 2, ["one request"] * n, range(n))
    counts, expected = torch.bincount(drawn, minlength=5), n * scores.softmax(-1)
    assert counts[4] == 0
    assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 16.3  # 3 degrees of freedom: 0.1 %


class Favour(LogitsProcessor):
    """Adds to one token; notes what it was given."""

    def __init__(self, token: int) -> None:
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores):
        self.seen.append(scores.clone())
        scores = scores.clone()
        scores[:, self.token] += 1000
        return scores


def test_custom_processors_come_before_the_draw(table):
    processor = Favour(42)
    options = {"logits_processor": LogitsProcessorList([processor]), "temperature": 0.5, "top_k": 5}
    assert texts(table, PROMPTS[:2], **options) == [[42] * NEW] * 2
    assert {type(scores) for scores in processor.seen} == {Tensor}
    assert (processor.seen[0] == table.table[[7, 8]]).all()  # before temperature and top-k
    assert texts(table, [[5]], logits_processor=LogitsProcessorList([Forbid()])) == [[2] * NEW]


class Forbid(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(VOCAB) != 2, -torch.inf)


def test_rows_that_end_and_streamers_and_criteria_see_plain_tensors(table):
    class See(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert type(input_ids) is Tensor
            return torch.ones(len(input_ids), dtype=torch.bool) if input_ids.shape[1] == 8 else torch.zeros(len(input_ids)) > 0

    class Stream:
        seen: list = []

        def put(self, value):
            assert type(value) is Tensor
            self.seen.append(value)

        def end(self):
            pass

    with owned_sampling(table, 3):
        out = table.generate(
            **padded([[5, 6, 7]]),
            max_new_tokens=NEW,
            do_sample=True,
            streamer=Stream(),
            stopping_criteria=StoppingCriteriaList([See()]),
        )
    assert out.shape[1] == 8 and len(Stream.seen) == 6
    assert out[0, 3:].tolist() == texts(table, [[5, 6, 7]])[0][:5]


# ------------------------------------------------------------------------------------------------------ a real small model
@pytest.fixture(scope="module")
def llama():
    return detlab.load_model("tiny-llama")[0]


def test_a_cache_and_chunks_of_the_prefill_move_nothing(llama):
    """At one row of float64: the model's own noise is far below what could flip a token here."""
    model = copy.deepcopy(llama).double()
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "top_k": 40}
    found = []
    for more in ({}, {"prefill_chunk_size": 2}, {"use_cache": False}, {"cache_implementation": "static"}):
        with owned_sampling(model, 5):
            found.append(model.generate(torch.tensor([[72, 105, 33, 32, 72]]), **options, **more)[0].tolist())
    assert found == [found[0]] * 4
    with owned_sampling(model, 5):
        batch = padded_with([[72, 105, 33, 32, 72], [65, 66], [67] * 9], 256)
        out = model.generate(**batch, **options)
    assert out[0, -8:].tolist() == found[0][-8:]


def test_a_capture_sees_the_same_text(llama):
    ids, options = torch.tensor([[72, 105, 33]]), {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2}
    with owned_sampling(llama, 1):
        expected = llama.generate(ids, **options)
        with detlab.capture(llama):
            assert llama.generate(ids, **options).tolist() == expected.tolist()


def padded_with(prompts, pad):
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != pad).long()}


def test_embeddings_need_ids_and_are_served_with_them(llama):
    ids = torch.tensor([[72, 105, 33]])
    embeddings = llama.get_input_embeddings()(ids).detach()
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 30}
    with owned_sampling(llama, 1), pytest.raises(UsageError, match="prompts came as inputs_embeds.*Give .* request_ids"):
        llama.generate(inputs_embeds=embeddings, **options)
    with owned_sampling(llama, 1, [request_id([72, 105, 33])]):
        found = llama.generate(inputs_embeds=embeddings, **options)
    with owned_sampling(llama, 1):
        assert llama.generate(ids, **options)[0, 3:].tolist() == found[0].tolist()


def test_a_prompt_that_begins_in_a_cache_needs_ids(llama):
    ids = torch.tensor([[72, 105, 33, 32]])
    cache = llama(ids[:, :2], use_cache=True).cache
    options = {"max_new_tokens": 3, "do_sample": True, "cache": cache, "attention_mask": torch.ones(1, 4)}
    with owned_sampling(llama, 1), pytest.raises(UsageError, match="beginning of the prompts is in a cache"):
        llama.generate(ids[:, 2:], **options)


# ------------------------------------------------------------------------------------------------------------------- ties
class Tied(Table):
    """Every token has the same logit, but the first two."""

    def __init__(self, config):
        super().__init__(config)
        self.table.data[:] = 0
        self.table.data[:, [PAD, EOS]] = -64


def test_of_equal_scores_the_lowest_token_wins():
    model = Tied(TableConfig(vocab_size=VOCAB)).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS, use_cache=False)
    inputs = padded(PROMPTS)
    assert (model.generate(**inputs, max_new_tokens=4)[:, -4:] == 2).all()  # stock, greedy
    with owned_sampling(model, 0):
        assert (model.generate(**inputs, max_new_tokens=4)[:, -4:] == 2).all()
        beams = model.generate(**inputs, max_new_tokens=4, num_beams=3, num_return_sequences=3)[:, -4:]
        assert beams.view(-1, 3, 4).tolist() == [[[2, 2, 2, 2], [2, 2, 2, 3], [2, 2, 2, 4]]] * len(PROMPTS)


def test_a_draw_between_equal_sums_takes_the_lowest_token(monkeypatch):
    from detlab.engine import scores

    monkeypatch.setattr(scores, "gumbels_of_rows", lambda seed, requests, positions, rows, at: np.zeros(len(at)))
    assert sample_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0, "a", 0).item() == 1
    tied = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert scores.draw_rows(tied, 4, 0, ["a", "b"], [0, 0]).tolist() == [[1, 2, 4, 3], [1, 3, 0, 2]]


def test_a_row_is_drawn_alike_alone_and_among_others():
    table = torch.randint(-40, 40, (40, 300), generator=torch.Generator().manual_seed(2)).float() / 8
    table[torch.randint(0, 2, (40, 300), generator=torch.Generator().manual_seed(3)) == 0] = -torch.inf
    requests, positions = [f"r{i}" for i in range(40)], list(range(40))
    alone = [sample_token(table[i], 6, requests[i], i).item() for i in range(40)]
    assert sample_token(table, 6, requests, positions).tolist() == alone
    assert sample_token(table.T.contiguous().T, 6, requests, positions).tolist() == alone  # other strides
    for i in range(40):
        assert alone[i] == int((table[i].double().numpy() + gumbels(6, requests[i], i, 300)).argmax())
    assert sample_token(table[:0], 6, [], 0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [5, 61, 1024, 50_257])
def test_torchs_argmax_takes_the_first_of_equal_maxima(dtype, size):
    """What its documentation says, and what greedy decoding relies on."""
    draw = np.random.default_rng(size)
    for _ in range(20):
        logits = torch.zeros(3, size, dtype=dtype)
        places = np.sort(draw.choice(size, 3, replace=False))
        logits[:, places] = 1
        assert logits.argmax(-1).tolist() == [places[0]] * 3


# ------------------------------------------------------------------------------------------------------- coming and going
NAMES = ("generate", "_get_logits_processor", "init_continuous_batching")


def is_restored(model) -> bool:
    return not set(NAMES) & set(vars(model))


def test_the_model_is_restored_whatever_happens(table):
    class Boom(Exception):
        pass

    class Explode(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise Boom

    with pytest.raises(Boom), owned_sampling(table, 0):
        assert not is_restored(table)
        table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True, logits_processor=LogitsProcessorList([Explode()]))
    assert is_restored(table)
    with pytest.raises(UsageError), owned_sampling(table, 0, ["only one"]):
        table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)
    assert is_restored(table)
    before = stock_texts(table, PROMPTS)
    texts(table, PROMPTS)
    assert stock_texts(table, PROMPTS) == before


def test_torchs_generator_is_neither_read_nor_moved(table):
    state = torch.get_rng_state()
    found = texts(table, PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12345)
    assert texts(table, PROMPTS) == found


def test_of_nested_blocks_the_inner_one_counts(table):
    with owned_sampling(table, 3):
        outer = table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)
        with owned_sampling(table, 4):
            inner = table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)
        assert torch.equal(table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True), outer)
    assert not torch.equal(inner, outer)
    assert is_restored(table)


def test_threads_have_blocks_of_their_own():
    model = fresh_table()
    expected = {seed: texts(model, PROMPTS, seed=seed) for seed in range(4)}
    found: dict[int, list] = {}
    barrier = threading.Barrier(4)

    def serve(seed: int) -> None:
        with owned_sampling(model, seed):
            barrier.wait()  # all four blocks are open
            found[seed] = model.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)[:, -NEW:].tolist()
            barrier.wait()

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected and is_restored(model)


def test_a_thread_without_a_block_uses_the_only_one_and_never_guesses(table):
    found = []

    def serve() -> None:
        try:
            found.append(table.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)[:, -NEW:].tolist())
        except UsageError as error:
            found.append(str(error))

    with owned_sampling(table, 3):
        run_thread(serve)
        with owned_sampling(table, 4):
            run_thread(serve)
    assert found[0] == texts(table, PROMPTS)
    assert found[1].startswith("2 blocks of owned_sampling are open on this model and this thread entered none")


def run_thread(target) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def test_a_copy_made_in_a_block_is_a_stock_model(table):
    with owned_sampling(table, 3):
        twin = copy.deepcopy(table)
        torch.manual_seed(3)
        found = twin.generate(**padded(PROMPTS), max_new_tokens=NEW, do_sample=True)[:, -NEW:].tolist()
    assert found == stock_texts(table, PROMPTS)


def test_what_others_put_in_place_is_neither_overwritten_nor_removed():
    model = fresh_table()
    model.generate = lambda *args, **kwargs: "theirs"
    with pytest.raises(UsageError, match="the model's generate was replaced already; undo that"), owned_sampling(model, 0):
        pass
    assert model.generate() == "theirs"
    del model.generate
    with owned_sampling(model, 0):
        model.generate = lambda *args, **kwargs: "theirs"
    assert model.generate() == "theirs"


# --------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.0, "7", None, True])
def test_a_seed_that_cannot_be_is_refused(table, seed):
    with pytest.raises(UsageError, match="seed=.* is not possible"), owned_sampling(table, seed):
        pass
    with pytest.raises(UsageError, match="seed=.* is not possible"):
        sample_token(torch.zeros(3), seed, "a", 0)


@pytest.mark.parametrize("ids", [[""], [7], [None], ["a", 5]])
def test_ids_that_cannot_be_are_refused(table, ids):
    with pytest.raises(UsageError, match="request id .* is not possible"), owned_sampling(table, 0, ids):
        pass


def test_one_text_is_not_a_list_of_ids(table):
    with pytest.raises(UsageError, match="request_ids='abc' is one text; give a list"), owned_sampling(table, 0, "abc"):
        pass


def test_another_number_of_ids_is_refused(table):
    for options, message in (
        ({}, "got 2 request_ids; this call of generate has 3 prompts and draws 3 texts"),
        ({"num_return_sequences": 2}, "has 3 prompts and draws 6 texts"),
        ({"num_beams": 2, "num_return_sequences": 2}, "has 3 prompts and draws 3 times"),
    ):
        with pytest.raises(UsageError, match=message):
            texts(table, PROMPTS[:3], ids=["a", "b"], **options)


def test_what_does_not_generate_is_refused():
    with pytest.raises(UsageError, match="needs a transformers model that generates; got Linear"):
        with owned_sampling(torch.nn.Linear(1, 1), 0):  # type: ignore[arg-type]
            pass

    class Own(Table):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    with pytest.raises(UsageError, match="Own has a generate of its own"):
        with owned_sampling(Own(TableConfig(vocab_size=VOCAB)), 0):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation' is not covered"),
        ({"penalty_alpha": 0.5, "top_k": 4, "do_sample": False}, "generation mode 'contrastive_search' is not covered"),
        ({"custom_generate": lambda model, *args, **kwargs: None}, "custom_generate is not covered"),
        ({"assistant_model": object()}, "assistant_model is not covered"),
        ({"cache_implementation": "paged"}, "batches continuously"),
        ({"token_healing": True}, "token_healing generates parts of the prompt anew"),
    ],
)
def test_ways_to_generate_that_are_not_covered_are_refused(table, options, message):
    with pytest.raises(UsageError, match=message):
        texts(table, [[5, 6]], **options)
    with owned_sampling(table, 0), pytest.raises(UsageError, match="continuous batching is not covered"):
        table.init_continuous_batching()


def test_a_loop_that_draws_otherwise_is_refused(table):
    class Loop(Table):
        def _sample(self, input_ids, logits_processor, **kwargs):
            for _ in range(2):
                scores = logits_processor(input_ids, self(input_ids).logits[:, -1])
                input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], -1)
            return input_ids

    class Wrong(Table):
        def _sample(self, input_ids, logits_processor, **kwargs):
            scores = logits_processor(input_ids, self(input_ids).logits[:, -1])
            return torch.multinomial(scores.exp(), 1)

    for kind, message in ((Loop, "not from its request's random numbers"), (Wrong, "other than a softmax of the scores")):
        model = kind(TableConfig(vocab_size=VOCAB))
        model.generation_config = GenerationConfig(pad_token_id=PAD, use_cache=False)
        with pytest.raises(UsageError, match=message):
            texts(model, [[5, 6]])


def test_scores_that_cannot_be_drawn_from_are_refused():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(UsageError, match="scores of request 'a' at position 2 hold NaN or"):
            sample_token(torch.tensor([0.0, bad]), 0, "a", 2)
    with pytest.raises(UsageError, match="are all -inf, so no token can be drawn"):
        sample_token(torch.full((3,), -torch.inf), 0, "a", 2)
    for shape in ((), (2, 3, 4), (0,)):
        with pytest.raises(UsageError, match=r"takes float scores \[vocab\] or \[rows, vocab\]"):
            sample_token(torch.zeros(shape), 0, "a", 0)
    with pytest.raises(UsageError, match="got 2 rows of scores, 1 request ids and 2 positions"):
        sample_token(torch.zeros(2, 3), 0, "a", 0)
    with pytest.raises(UsageError, match="got one row of scores; give one request id"):
        sample_token(torch.zeros(3), 0, ["a"], 0)


def test_a_request_is_named_by_its_tokens_and_sample():
    assert request_id(torch.tensor([5, 6])) == request_id([5, 6]) == request_id((5, 6), 0)
    assert len({request_id([5, 6]), request_id([6, 5]), request_id([5]), request_id([5, 6], 1), request_id([0, 5, 6])}) == 5
    for tokens in ([-1], [1.5], [True], [1 << 63], ["5"]):
        with pytest.raises(UsageError, match="token id .* is not possible"):
            request_id(tokens)
    for number in (-1, 0.5, None):
        with pytest.raises(UsageError, match="sample_number .* is not possible"):
            request_id([5], number)
    with pytest.raises(UsageError, match="request_id got no tokens"):
        request_id([])
    for tensor in (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2)):
        with pytest.raises(UsageError, match="takes the token ids of one prompt"):
            request_id(tensor)
