"""fused_norm.integrations.transformers: tiny random models give what they gave."""

import copy
import functools
import sys

import kernels
import pytest
import torch
import transformers
from stacks_harness import relative_error
from transformers.masking_utils import causal_mask_function

import fused_norm
from fused_norm.integrations import transformers as fused

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]
# name: (model class, config class, options): what its attention has beside causality
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "sliding": ("MistralForCausalLM", "MistralConfig", {**COMMON, "sliding_window": 5}),
    "softcap": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **COMMON,
            "sliding_window": 5,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **COMMON,
            "sliding_window": 5,
            "layer_types": ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "zero_centered": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**COMMON, "layer_types": ["full_attention", "full_attention"]},
    ),
    "latent": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{k: v for k, v in COMMON.items() if k != "head_dim"},
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "first_k_dense_replace": 2,
        },
    ),
    "chunks": (  # attention within them, which is no window
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **COMMON,
            "attention_chunk_size": 5,
            "layer_types": None,
            "intermediate_size_mlp": 48,
            "num_local_experts": 1,
            "moe_layers": [],
        },
    ),
    "cross_attention": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 32,
        },
    ),
    "position_bias": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}
# How often they attend in a forward pass; the others twice.
ATTENTIONS = {"cross_attention": 3, "position_bias": 6}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def registered():
    fused.register()
    yield
    fused.unregister()


each_flag = pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])


def make(name, attention="eager", **options):
    model_class, config_class, usual = MODELS[name]
    config = getattr(transformers, config_class)(**{**usual, **options})
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def batch(padding=None, length=12):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 64, (3, length), generator=generator)
    inputs = {"input_ids": tokens, "labels": tokens}
    if padding is not None:
        mask = torch.ones(3, length, dtype=torch.long)
        if padding == "left":
            mask[0, :4] = mask[2, :1] = 0
        else:
            mask[0, -4:] = mask[2, -1:] = 0
        # What a padding token says of the one behind it is arbitrary: eager attention looks at all
        # keys where there are none to see.
        shown = mask * mask.roll(1, 1) if padding == "left" else mask
        inputs |= {"attention_mask": mask, "labels": torch.where(shown == 1, tokens, -100)}
    return inputs


def run(model, inputs):
    """{name: gradient, or the logits of tokens that are no padding}."""
    model.zero_grad()
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    results = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return results | {"logits": output.logits.detach()[inputs["labels"] != -100]}


@pytest.mark.parametrize("padding", [None, "left", "right"])
@each_model
def test_attention(name, padding, calls):
    expected = run(make(name), batch(padding))
    model = make(name, "fused_norm")
    results = {}
    counted = calls(lambda: results.update(run(model, batch(padding))), "attention_forward")
    assert counted == ATTENTIONS.get(name, 2)
    assert relative_error(results, expected) < 2e-6
    if name != "position_bias":  # T5's stacks keep what they were made with
        model.set_attn_implementation("eager")
        assert relative_error(run(model, batch(padding)), expected) == 0


def test_a_window_has_no_mask_in_memory():
    """A mask of 4096 x 4096 would be 16 MB."""
    model = make("sliding", "fused_norm", max_position_embeddings=8192)
    config, embeddings = model.config, torch.zeros(1, 4096, 32)
    make_mask = transformers.masking_utils.create_sliding_window_causal_mask
    assert make_mask(config, embeddings, None, None).numel() == 0
    padded = torch.ones(1, 4096, dtype=torch.long)
    padded[:, 0] = 0
    assert make_mask(config, embeddings, padded, None).untyped_storage().nbytes() == 3 * 4
    padded[:, 9] = 0  # tokens behind a hole see those before it
    assert make_mask(config, embeddings, padded, None).shape == (1, 1, 4096, 4096)
    make_mask = transformers.masking_utils.create_bidirectional_sliding_window_mask
    assert make_mask(config, embeddings, None).numel() == 0
    assert make_mask(config, embeddings, padded).shape == (1, 1, 4096, 4096)
    padded[:, 9] = 1
    assert make_mask(config, embeddings, padded).untyped_storage().nbytes() == 3 * 4


def packed():
    """Several sequences in a row, told apart by their positions."""
    positions = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], [*range(12)], [0, 1, 0, *range(9)]]
    return batch() | {"position_ids": torch.tensor(positions)}


@pytest.mark.parametrize(
    "inputs", [batch("left"), batch("right"), packed()], ids=["left", "right", "packed"]
)
@pytest.mark.parametrize("name", ["llama", "sliding", "softcap", "sinks", "latent"])
def test_padded_and_packed_rows_need_no_mask(name, inputs, calls, monkeypatch):
    expected = run(make(name), inputs)
    makes = fused.sdpa_mask

    def none(*args, **options):
        assert makes(*args, **options) is None

    monkeypatch.setattr(fused, "sdpa_mask", none)
    results = {}
    counted = calls(
        lambda: results.update(run(make(name, "fused_norm"), inputs)), "attention_forward"
    )
    assert counted == 2 and relative_error(results, expected) < 2e-6


SPARSE = {  # beside these, as "latent"
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "moe_intermediate_size": 16,
}
# How often they attend by this library in a forward pass.
UNUSUAL = {
    # Keys are chosen by the model, which folds them into the masks of eager and sdpa alone.
    "sparse": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**MODELS["latent"][2], **SPARSE}, 2),
    # It has its own attention alone, which takes the mask for eager.
    "no_choice": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32}, 0),
    # Its decoder says that it is not causal.
    "says_no": (
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            **MODELS["cross_attention"][2],
            "num_experts": 2,
            "decoder_start_token_id": 0,
        },
        3,
    ),
    # Looks at a window's mask itself.
    "looks": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **COMMON,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 8,
            "o_groups": 2,
            "qk_rope_head_dim": 8,
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 5,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
        },
        2,
    ),
}


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_models_that_do_more_with_masks(name, padding, calls, monkeypatch):
    *made, attentions = UNUSUAL[name]
    monkeypatch.setitem(MODELS, name, tuple(made))
    expected = run(make(name), batch(padding))
    model, results = make(name, "fused_norm"), {}
    counted = calls(lambda: results.update(run(model, batch(padding))), "attention_forward")
    assert counted == attentions and relative_error(results, expected) < 2e-6


def test_a_cache_that_says_one_key(monkeypatch):
    """The mask's sizes come from the first layer, which attends to nothing."""
    options = {k: v for k, v in COMMON.items() if k not in ("head_dim", "num_key_value_heads")}
    options |= {"lru_width": 32, "attention_window_size": 6}
    options |= {"block_types": ["recurrent", "attention"]}
    made = ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", options)
    monkeypatch.setitem(MODELS, "recurrent", made)
    tokens = batch()["input_ids"]
    texts = [
        make("recurrent", attention).generate(tokens, max_new_tokens=5, do_sample=False)
        for attention in ("eager", "fused_norm")
    ]
    assert torch.equal(*texts) and texts[0].shape[1] > 13


def test_packed_positions_matter():
    together, alone = (run(make("llama", "fused_norm"), inputs) for inputs in (packed(), batch()))
    assert relative_error(alone, together) > 1e-2


ROWS = [tokens[:n] for tokens, n in zip(batch()["input_ids"].tolist(), (12, 4, 7), strict=True)]


def collated():
    """The rows as one packed row, with the offsets of its sequences."""
    collator = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True
    )
    return collator([{"input_ids": row} for row in ROWS])


each_cache = pytest.mark.parametrize("use_cache", [False, True])


@each_cache
@pytest.mark.parametrize("name", ["llama", "sliding", "softcap", "sinks", "latent"])
def test_offsets_separate_packed_rows(name, use_cache):
    """As if each row came alone, to fp32's roundings."""
    model = make(name, "fused_norm")
    alone = [model(torch.tensor([row])).logits[0] for row in ROWS]
    packed = model(**collated(), use_cache=use_cache).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


@each_cache
@pytest.mark.parametrize("name", ["llama", "sliding", "chunks"])
def test_offsets_separate_rows_without_positions(name, use_cache):
    """No row sees the one before it. (Chunks are of the packed row, in every implementation.)"""
    model, inputs = make(name, "fused_norm"), collated()
    del inputs["position_ids"]
    first, behind = len(ROWS[0]), []
    for token in (1, 3):
        inputs["input_ids"][0, :first] = token
        behind.append(model(**inputs, use_cache=use_cache).logits[0, first:])
    assert torch.equal(*behind)


def test_offsets_of_sequences_are_of_one_row():
    model = make("llama", "fused_norm")
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k are of one row"):
        model(batch()["input_ids"], cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_other_masks_are_those_of_sdpa(name, monkeypatch):
    """A hole in the padding; a function that a model adds to causality, beside packed rows."""
    inputs = batch("left")
    inputs["attention_mask"][1, 5] = 0
    inputs["labels"][1, 5:7] = -100
    expected = run(make(name), inputs)
    assert relative_error(run(make(name, "fused_norm"), inputs), expected) < 2e-6

    create = transformers.masking_utils.create_causal_mask
    module = transformers.models.llama.modeling_llama

    def hides_the_third(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx != 2) | (q_idx == 2)

    masks = functools.partial(create, and_mask_function=hides_the_third)
    monkeypatch.setattr(module, "create_causal_mask", masks)
    expected = run(make("llama"), packed())
    assert relative_error(run(make("llama", "fused_norm"), packed()), expected) < 2e-6
    monkeypatch.setattr(module, "create_causal_mask", create)
    assert relative_error(run(make("llama", "fused_norm"), packed()), expected) > 1e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "sliding", "softcap", "sinks"])
def test_generation(name, cache):
    inputs = batch("left")
    del inputs["labels"]
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    options["disable_compile"] = True
    expected = make(name).generate(**inputs, **options)
    tokens = make(name, "fused_norm").generate(**inputs, **options)
    assert expected.shape[1] > 14 and torch.equal(tokens, expected)


@pytest.mark.parametrize("window", [5, 32])
@pytest.mark.parametrize("padding", [None, "left"])
def test_layers_that_share_keys(padding, window, monkeypatch):
    """Before them Gemma 4 of transformers 5.24 cuts queries and masks to the rows whose logits are
    wanted. (With 5.19, which does not, the next test sees a fault.)"""
    options = {
        **COMMON,
        "num_hidden_layers": 6,
        "layer_types": ALTERNATING * 3,
        "sliding_window": window,
        "num_kv_shared_layers": 2,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "eos_token_id": None,
    }
    monkeypatch.setitem(MODELS, "shared", ("Gemma4ForCausalLM", "Gemma4TextConfig", options))
    usual, ours = make("shared"), make("shared", "fused_norm")
    inputs = batch(padding)
    del inputs["labels"]
    for keep in (0, 1, 3):
        for cache in (None, transformers.StaticCache):
            logits = []
            for model in (usual, ours):
                past = None if cache is None else cache(config=model.config, max_cache_len=16)
                kept = {"logits_to_keep": keep, "past_key_values": past}
                logits.append(model(**inputs, **kept, use_cache=past is not None).logits)
            if padding:
                shown = inputs["attention_mask"][:, -logits[0].shape[1] :] == 1
                logits = [of_all[shown] for of_all in logits]
            assert relative_error({0: logits[1]}, {0: logits[0]}) < 2e-6
    generation = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(
        usual.generate(**inputs, **generation), ours.generate(**inputs, **generation)
    )


def test_masks_that_a_model_cuts_are_tensors(monkeypatch, request):
    """With a transformers too whose Gemma 4 does not cut them."""
    cuts = "_maybe_slice_kv_shared_inputs"
    monkeypatch.setattr(transformers.Gemma4TextModel, cuts, None, raising=False)
    fused._masks.cache_clear()
    request.addfinalizer(fused._masks.cache_clear)
    shapes = {}
    for shared in (0, 2):
        config = transformers.Gemma4TextConfig(num_kv_shared_layers=shared)
        made = fused.mask(2, 9, 9, config=config, mask_function=causal_mask_function)
        shapes[shared] = None if made is None else tuple(made.shape)
    assert shapes == {0: None, 2: (2, 1, 9, 9)}


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", ["llama", "sliding", "softcap"])
def test_compiled(name, padding):
    torch._dynamo.reset()
    expected = run(make(name), batch(padding))
    model = make(name, "fused_norm")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert relative_error(run(model, batch(padding)), expected) < 2e-6


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_traced_by_jit():
    """A mask of its own, whose sizes are tensors there."""
    config = transformers.CLIPTextConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
    )
    config.return_dict = False
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    model = transformers.CLIPTextModel._from_config(config, attn_implementation="fused_norm").eval()
    traced = torch.jit.trace(model, tokens)
    torch.testing.assert_close(traced(tokens), model(tokens))


def test_learned_queries_of_batch_one():
    config = transformers.Blip2QFormerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        encoder_hidden_size=32, cross_attention_frequency=1,
    )  # fmt: skip
    torch.manual_seed(0)
    queries, images = torch.randn(1, 4, 32), torch.randn(3, 6, 32)
    model = transformers.Blip2QFormerModel._from_config(config, attn_implementation="sdpa").eval()
    wanted = model(query_embeds=queries, encoder_hidden_states=images).last_hidden_state
    model.set_attn_implementation("fused_norm")
    out = model(query_embeds=queries, encoder_hidden_states=images).last_hidden_state
    assert out.shape == (3, 4, 32)
    torch.testing.assert_close(out, wanted)


def test_dropout_is_of_training_alone():
    model = make("llama", "fused_norm", attention_dropout=0.5)
    logits = [model(**batch()).logits for _ in range(2)]
    assert torch.equal(*logits)
    logits = [model.train()(**batch()).logits for _ in range(2)]
    assert not torch.equal(*logits)


def test_what_it_cannot_do_is_an_error():
    model = make("llama", "fused_norm")
    with pytest.raises(ValueError, match="paged"):
        q = torch.zeros(1, 4, 3, 8)
        fused.attention(model, q, q, q, None, cache=object())
    for option in ("block_indices", "sinks"):
        with pytest.raises(ValueError, match=f"{option} of LlamaForCausalLM: use eager"):
            fused.attention(model, q, q, q, None, **{option: torch.zeros(1, 2, 3, 1)})
    padded = torch.ones(2, 3, dtype=torch.bool)
    padded[0, 0] = False
    places = fused.mask(2, 3, 3, mask_function=causal_mask_function, attention_mask=padded)
    for query, key in ((q, q), (q.expand(2, -1, -1, -1), torch.zeros(2, 4, 4, 8))):
        with pytest.raises(ValueError, match=r"\(4, 2, 1, 1\) .* key \((1, 4, 3|2, 4, 4), 8\)"):
            fused.attention(model, query, key, key, places)


def test_a_mask_of_integers_is_an_error():
    """It would be added to the scores."""
    inputs = batch(None)
    length = inputs["input_ids"].shape[1]
    inputs["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.long).tril()
    with pytest.raises(ValueError, match="attention_mask must be of bool.*int64"):
        run(make("llama", "fused_norm"), inputs)


def test_a_model_with_a_table_of_its_own_takes_the_function_of_torch(monkeypatch):
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    make_falcon = transformers.FalconForCausalLM._from_config
    with pytest.raises(KeyError, match="fused_norm"):
        make_falcon(config, attn_implementation="fused_norm")
    model = make_falcon(config, attn_implementation="sdpa").eval()
    tokens = torch.arange(14).view(2, 7)
    wanted = model(tokens).logits
    ours = fused_norm.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ours)
    torch.testing.assert_close(model(tokens).logits, wanted)


ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Theirs attend twice in a forward pass, but for BART's, of whose three two see the padding.
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2},
    ),
    "cross_attention": MODELS["cross_attention"],
}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


@pytest.mark.parametrize("padding", [None, "right"])
def test_an_encoder_that_knows_eager_alone(padding):
    inputs, outputs = batch(padding), []
    del inputs["labels"]
    for attention in ("eager", "fused_norm"):
        torch.manual_seed(0)
        model = transformers.SplinterModel(transformers.SplinterConfig(**ENCODER)).eval()
        model.set_attn_implementation(attention)
        outputs.append({"output": model(**inputs).last_hidden_state})
    if padding:
        outputs = [{"output": o["output"][inputs["attention_mask"] == 1]} for o in outputs]
    assert relative_error(*outputs) < 2e-6


@pytest.fixture
def packed_calls(monkeypatch):
    """A list that grows by the sequences of each call of packed attention."""
    monkeypatch.setattr(sys.modules[__name__], "MODELS", {**MODELS, **ENCODERS})
    packs, counts = fused.functional.flash_attention_varlen, []

    def packed(query, key, value, at_q, at_k, *args, **options):
        counts.append(len(at_q) - 1)
        return packs(query, key, value, at_q, at_k, *args, **options)

    monkeypatch.setattr(fused.functional, "flash_attention_varlen", packed)
    return counts


def padded(name, padding, length=12):
    """Of a row that is all padding nothing is compared."""
    inputs = batch(None, length)
    shown = torch.ones(3, length, dtype=torch.long)
    if padding == "left":
        shown[0, :5] = shown[2, :1] = 0
    elif padding == "right":
        shown[0, -5:] = shown[2, -1:] = 0
    elif padding == "both":
        shown[0, :2] = shown[0, -3:] = shown[1, :1] = shown[2, -2:] = 0
    elif padding == "all":
        shown[1], shown[2, -3:] = 0, 0
    elif padding == "hole":
        shown[0, 4:6] = shown[1, -2:] = 0
    labels = torch.where(shown == 1, inputs["labels"], -100)
    inputs |= {"attention_mask": shown, "labels": labels}
    if name == "cross_attention":  # as many queries as keys in some, all of them shown
        inputs["labels"] = batch(None, 12)["labels"]
        inputs["labels"][shown.sum(1) == 0] = -100
    return inputs


def run_padded(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    results = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return results | {"logits": output.logits.detach()[inputs["labels"] != -100]}


@pytest.mark.parametrize("reference", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [12, 5, 31])
@pytest.mark.parametrize("padding", ["left", "right", "both", "all"])
@each_encoder
def test_padded_encoders_need_no_mask(name, padding, length, reference, packed_calls, monkeypatch):
    inputs = padded(name, padding, length)
    expected = run_padded(make(name, reference), inputs)
    if name != "cross_attention":  # the decoder makes its own, of causal attention
        monkeypatch.setattr(fused, "sdpa_mask", None)
    results = run_padded(make(name, "fused_norm"), inputs)
    assert relative_error(results, expected) < 2e-6
    assert len(packed_calls) == 2 and (name == "modernbert" or packed_calls == [6, 6])


@pytest.mark.parametrize("padding", [None, "none", "hole"])
@each_encoder
def test_encoders_without_padding_or_with_holes(name, padding, packed_calls):
    inputs = padded(name, padding)
    if padding is None:
        del inputs["attention_mask"]
    expected = run_padded(make(name), inputs)
    results = run_padded(make(name, "fused_norm"), inputs)
    assert relative_error(results, expected) < 2e-6
    # A window with a mask that hides nothing is one of sequences, the rows.
    assert packed_calls == ([3] if (name, padding) == ("modernbert", "none") else [])


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# name: (model class, config class, options, the input's shape, the mask's length)
SIGNALS = {
    "vit": ("ViTModel", "ViTConfig", {"image_size": 16, "patch_size": 4}, (3, 16, 16), 17),
    "wav2vec2": (  # its mask is of samples
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {"conv_dim": (32,), "conv_stride": (2,), "conv_kernel": (2,), "num_feat_extract_layers": 1}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4},
        (24,),
        24,
    ),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_padded_signals(name, packed_calls, monkeypatch):
    model_class, config_class, options, shape, length = SIGNALS[name]
    monkeypatch.setitem(MODELS, name, (model_class, config_class, {**SIZES, **options}))
    shown = torch.ones(3, length, dtype=torch.long)
    shown[0, -6:] = shown[2, -2:] = 0
    signals = torch.randn(3, *shape)

    def results(attention):
        model = make(name, attention)
        out = model(signals, attention_mask=shown).last_hidden_state
        factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * factors).sum().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found | {"output": out.detach()}

    expected = results("sdpa")  # padding says what it says there
    assert relative_error(results("fused_norm"), expected) < 2e-6
    assert packed_calls == [6, 6]


def test_padding_says_what_it_said(packed_calls):
    """In full attention it sees the tokens, as with the mask of sdpa: some models mix the two."""
    inputs = padded("bert", "left")
    del inputs["labels"]
    expected, logits = (make("bert", a)(**inputs).logits for a in ("sdpa", "fused_norm"))
    assert len(packed_calls) == 2
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@each_encoder
def test_padded_encoders_with_checkpoints(name, reentrant, packed_calls):
    inputs = padded(name, "left")
    expected = run_padded(make(name), inputs)
    model = make(name, "fused_norm")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()  # without dropout
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for dropout in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    model.enable_input_require_grads()
    assert relative_error(run_padded(model, inputs), expected) < 2e-6
    assert len(packed_calls) == 4


def test_dropout_in_padded_encoders(packed_calls):
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    inputs = padded("bert", "right")
    model = make("bert", "fused_norm", **options)
    assert torch.equal(*(model(**inputs).logits for _ in range(2)))
    assert not torch.equal(*(model.train()(**inputs).logits for _ in range(2)))
    assert len(packed_calls) == 8


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_an_encoder_takes_masks_of_four_dimensions(dtype, packed_calls):
    inputs = padded("bert", "left")
    shown = inputs["attention_mask"][:, None, None].bool().expand(-1, 1, 12, -1).tril(8)
    shown = shown | torch.eye(12, dtype=torch.bool)
    if dtype is not torch.bool:
        shown = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(dtype).min)
    inputs["attention_mask"] = shown
    expected = run_padded(make("bert", "sdpa"), inputs)
    assert relative_error(run_padded(make("bert", "fused_norm"), inputs), expected) < 2e-6
    assert packed_calls == []


@each_encoder
def test_padded_encoders_compiled(name, packed_calls):
    torch._dynamo.reset()
    inputs = padded(name, "left")
    expected = run_padded(make(name), inputs)
    model = make(name, "fused_norm")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert relative_error(run_padded(model, inputs), expected) < 2e-6
    assert packed_calls == []


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", ["left", "right", "hole"])
@pytest.mark.parametrize("name", ["cross_attention", "position_bias"])
def test_generation_from_a_padded_encoder(name, padding, beams, packed_calls):
    inputs = padded("bert", padding)
    del inputs["labels"]
    options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams}
    options["decoder_input_ids"] = torch.tensor([[2, 5, 9]] * 3)  # more queries than one
    expected = make(name).generate(**inputs, **options)
    tokens = make(name, "fused_norm").generate(**inputs, **options)
    assert expected.shape[1] > 5 and torch.equal(tokens, expected)
    # The encoder's, and the decoder's first step.
    has_masks = name == "position_bias" or padding == "hole"
    assert packed_calls == ([] if has_masks else [6, 6 * beams])


def test_a_decoder_to_an_encoder_without_a_mask(packed_calls, monkeypatch):
    """Whisper's: padding is of the decoder alone."""
    options = {k: v for k, v in MODELS["cross_attention"][2].items() if "position" not in k}
    options |= {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
    options |= {f"{token}_token_id": 1 for token in ("pad", "bos", "eos", "decoder_start")}
    made = ("WhisperForConditionalGeneration", "WhisperConfig", options)
    monkeypatch.setitem(MODELS, "speech", made)
    shown = padded("bert", "right")["attention_mask"]
    inputs = {"input_features": torch.randn(3, 8, 20), "labels": batch()["labels"]}
    inputs |= {"decoder_attention_mask": shown, "decoder_input_ids": batch()["input_ids"]}
    inputs["labels"] = torch.where(shown == 1, inputs["labels"], -100)
    expected = run_padded(make("speech"), inputs)
    assert relative_error(run_padded(make("speech", "fused_norm"), inputs), expected) < 2e-6
    assert packed_calls == [5]  # rows of 12 tokens: two with padding, one without


def full_mask(**options):
    shown = padded("bert", "both", 7)["attention_mask"].bool()
    function = transformers.masking_utils.bidirectional_mask_function
    usual = {"mask_function": function, "attention_mask": shown, "allow_is_causal_skip": False}
    return fused.mask(3, 5, 7, **{**usual, "allow_is_bidirectional_skip": True, **options})


def test_a_mask_of_full_attention_is_for_these_queries_and_keys():
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 6)
    made, dense = full_mask(), full_mask(allow_is_bidirectional_skip=False)
    assert made.shape == (7, 1, 2, 7) and made.untyped_storage().nbytes() == 2 * 7 * 4
    assert dense.shape == (3, 1, 5, 7)
    more = {"scaling": 0.3, "s_aux": torch.randn(4), "softcap": 5.0}
    bias, indices = torch.randn(1, 4, 5, 7), torch.randint(0, 7, (3, 5, 4))
    for options in ({}, {"position_bias": bias}, {"indices": indices}):
        expected, out = (
            fused.attention(module, q, k, v, m, **more, **options) for m in (dense, made)
        )
        assert out[0].shape == (3, 5, 4, 6) and out[0].is_contiguous()
        torch.testing.assert_close(out, expected)
    wrong = [made.repeat(2, 1, 1, 1), made.repeat_interleave(2, 0), made[[0, 2]], made[..., :5]]
    wrong += [made.expand(-1, 3, 2, -1)[:, :, :1], torch.ones(1, 1, 5, 7, dtype=torch.int32)]
    for other in wrong:
        for b in (1, 2, 3, 6):
            tensors = (t[:1].expand(b, -1, -1, -1) for t in (q, k, v))
            with pytest.raises(ValueError, match="is not for query"):
                fused.attention(module, *tensors, other)


# Norms of these classes, and how many.
LAYERS = {"llama": 5, "zero_centered": 9, "softcap": 0}


@each_flag
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_kernels(name, training, calls, memory_efficient):
    fused.register(memory_efficient=memory_efficient)
    original = make(name).train(training)
    expected = run(original, batch())
    model = copy.deepcopy(original)
    state, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    model.set_use_kernels(True)
    results = {}
    counted = calls(lambda: results.update(run(model, batch())), "norm_forward")
    assert counted == LAYERS[name]
    assert relative_error(results, expected) < 2e-6
    assert list(model.state_dict()) == state and [n for n, _ in model.named_modules()] == names
    model.train(not training)  # transformers chooses again
    model.train(training)
    assert relative_error(run(model, batch()), expected) < 2e-6
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    run(model, batch())  # compiles
    counted = calls(lambda: results.update(run(model, batch())), "norm_forward")
    assert counted == LAYERS[name]
    assert relative_error(results, expected) < 2e-6


def saved_bytes(model):
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = model(**batch(), use_cache=False)  # so that no address comes twice
    del kept
    return sum(sizes.values())


GATED = {
    "qwen": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "olmo": ("OlmoHybridForCausalLM", "OlmoHybridConfig"),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", GATED)
def test_gated_layers_of_kernels(name, training, calls, monkeypatch):
    linear = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    monkeypatch.setitem(MODELS, name, (*GATED[name], {**COMMON, **linear}))
    original = make(name).train(training)
    expected = run(original, batch())
    model = copy.deepcopy(original)
    state = list(model.state_dict())
    model.set_use_kernels(True)
    assert relative_error(run(model, batch()), expected) < 2e-6  # the class is looked at first
    assert calls(lambda: run(model, batch()), "rms_norm_gated_forward") == 1
    assert list(model.state_dict()) == state


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_layer_takes_what_it_knows(activation, calls):
    """Both activations, compiled too; other ones, and other classes, run their own code."""
    module = transformers.models.qwen3_5.modeling_qwen3_5
    layer = fused._Repository("RMSNormGated").load()
    norm = module.Qwen3_5RMSNormGated(16)
    norm.activation = activation
    x, gate = torch.randn(2, 5, 3, 16)
    expected = norm(x, gate)
    torch.testing.assert_close(layer.forward(norm, x, gate), expected)
    assert calls(lambda: layer.forward(norm, x, gate), "rms_norm_gated_forward") == 1
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: layer.forward(norm, *args), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x, gate), expected)
    norm.activation = "gelu"
    torch.testing.assert_close(layer.forward(norm, x, gate), norm(x, gate), rtol=0, atol=0)

    class Other(module.Qwen3_5RMSNormGated):
        def forward(self, hidden_states, gate):
            return super().forward(hidden_states, 2 * gate)

    other = Other(16)
    other.activation = activation
    torch.testing.assert_close(layer.forward(other, x, gate), other(x, gate), rtol=0, atol=0)
    assert calls(lambda: layer.forward(other, x, gate), "rms_norm_gated_forward") == 0


def test_layers_of_kernels_save_memory():
    saved = []
    for memory_efficient in (False, True):
        fused.register(memory_efficient)
        model = make("llama").train()
        model.set_use_kernels(True)
        saved.append(saved_bytes(model))
    # The inputs of five norms, one of which the embedding's output is, kept by nobody else.
    rows = 3 * 12 * 32 * 4
    assert saved[1] <= saved[0] - 4 * rows


@pytest.mark.parametrize("first", ["register", "set_use_kernels"])
@pytest.mark.parametrize("name", ["INFERENCE", "TRAINING"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_are_not_overruled(device, name, first, monkeypatch, calls):
    """set_use_kernels registers transformers' own choice each time, which comes from the Hub."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    if first == "set_use_kernels":
        fused.unregister()
        make("llama").set_use_kernels(True)
        fused.register()
    for mode in (kernels.Mode[name], kernels.Mode[name] | kernels.Mode.TORCH_COMPILE):
        model = make("llama")
        model.set_use_kernels(True)
        norm = kernels.kernelize(model.model.norm, mode=mode, device=device)
        assert calls(functools.partial(norm, torch.ones(2, 32)), "norm_forward") == 1


def test_a_kernel_config_has_the_last_word(monkeypatch, calls):
    class Repository:
        layer_name = "RMSNorm"

        def load(self):
            def forward(self, hidden_states):
                return 2 * hidden_states

            return type("RMSNorm", (torch.nn.Module,), {"forward": forward})

    mapping = {"RMSNorm": {"cpu": {kernels.Mode.INFERENCE: Repository()}}}
    config = transformers.KernelConfig(mapping)
    for check in ("sanitize_kernel_mapping", "create_compatible_mapping"):  # of names on the Hub
        monkeypatch.setattr(config, check, lambda model: None)
    model = make("llama")
    model.set_use_kernels(True, config)
    x = torch.ones(2, 32)
    assert calls(lambda: model(**batch()), "norm_forward") == 0
    assert torch.equal(model.model.norm(x), 2 * x)


def test_unregister():
    expected = run(make("llama"), batch())
    fused.unregister()
    own = transformers.integrations.hub_kernels.get_kernel_mapping_transformers()
    assert "cpu" in own["RMSNorm"] and not own["RMSNorm"]["cpu"]
    assert all(type(layer) is kernels.LayerRepository for layer in own["RMSNorm"]["cuda"].values())
    model = make("llama")
    model.set_use_kernels(True)
    assert relative_error(run(model, batch()), expected) == 0


@pytest.mark.parametrize("first", ["initialised", "converted"])
def test_weights_are_initialised_before_convert(first):
    """A model's own init_weights() goes by classes, which convert changes."""
    model_class, config_class, options = MODELS["zero_centered"]
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    model.to_empty(device="cpu")
    norms = [m for n, m in model.named_modules() if n.endswith("layernorm")]
    if first == "initialised":
        model.init_weights()
    assert len(fused_norm.convert(model)) >= len(norms) > 0
    if first == "converted":
        model.init_weights()
    for norm in norms:
        assert norm.weight_offset == 1 and (norm.weight == (first == "converted")).all()


def test_convert_and_attention_together():
    expected = run(make("llama"), batch("left"))
    model = make("llama", "fused_norm")
    assert len(fused_norm.convert(model, memory_efficient=True)) == 5
    assert relative_error(run(model, batch("left")), expected) < 2e-6
    assert fused_norm.revert(model) == 5
