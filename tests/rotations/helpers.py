"""Rotations and tiny models for the tests of rotations."""

import torch

from sglang_kvq.rotations import RotationMeta, Rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.inspection.divergence import divergences
from sglang_kvq.rotations.maths.fake_quant import causal_attention
from sglang_kvq.rotations.maths.transform import coding_basis


def random_rotations(layers=2, heads=2, dim=64, seed=0, balanced=False) -> Rotations:
    """Returns orthogonal rotations; ``balanced`` multiplies keys by a matrix and queries by its inverse."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.linalg.qr(torch.randn(layers, heads, dim, dim, generator=generator)).Q for _ in range(2))
    eigen = torch.rand(layers, heads, dim, generator=generator)
    q = None
    if balanced:
        scales = torch.rand(layers, heads, dim, 1, generator=generator) + 0.5
        k, q = scales * k, k / scales
    return Rotations(
        k, v, RotationMeta(objective="test", base_model="org/tiny", clip_k=0.9, clip_v=0.92), eigen, eigen + 1, q
    )


def random_transform(layers=2, heads=2, dim=64, seed=0, decades=4.0) -> Rotations:
    """Returns bases for transform coding, of random matrices whose eigenvalues span ``decades`` decades."""
    generator = torch.Generator().manual_seed(seed)

    def moment() -> torch.Tensor:
        u = torch.linalg.qr(torch.randn(layers, heads, dim, dim, generator=generator, dtype=torch.float64)).Q
        return u * torch.logspace(0, -decades, dim, dtype=torch.float64) @ u.mT

    found = {}
    for part, reader in (("k", "q"), ("v", "o")):
        basis = coding_basis(moment(), moment())
        sigma = basis.energies.sqrt()
        found[part] = (basis.encode / sigma[..., None, :]).float()
        found[reader] = (basis.decode * sigma[..., :, None]).mT.float()
        found[f"{part}_energies"] = basis.energies.float()
    importance = {part: (torch.rand(layers, generator=generator) + 0.5).tolist() for part in "kv"}
    meta = RotationMeta(objective="transform", base_model="org/tiny", importance=importance)
    return Rotations(**found, meta=meta, k_mean=torch.randn(layers, heads, dim, generator=generator))


def tiny_llama(layers=2, heads=4, kv_heads=2, dim=64):
    """Returns a random Llama whose keys have a strong constant part, as in trained models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        attention_bias=True,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=1.0)
    return model


def tiny_model_folder(folder, tokens):
    """Saves a ``tiny_llama`` with a tokenizer of 97 words, and a text of random words. Returns both paths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(97)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_llama().save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder / "model")
    text, generator = folder / "corpus.txt", torch.Generator().manual_seed(0)
    text.write_text(" ".join(words[i] for i in torch.randint(97, (tokens,), generator=generator).tolist()))
    return folder / "model", text


def mean_kl(model, contexts, candidates, *, first=500):
    """Returns the mean KL of ``divergences`` over tokens, by the candidate's name."""
    return {
        name: float(found.kl.mean()) for name, found in divergences(model, contexts, candidates, first=first).items()
    }


@torch.no_grad()
def exact_sums(model, ids, chosen, quantizer, *, first):
    """Computes the KL divergence that ``fisher_sums`` approximates, directly, for the chosen layers."""

    def log_probs(only, variant):
        def hook(layer, q, k, v, scale):
            if layer != only:
                return None
            (change,) = quantizer.delta(layer, q, k, v, scale, [variant])
            return causal_attention(q, k, v, scale) + change.to(q.dtype)

        with attention_hook(model, hook):
            out = model(ids[None].to(model.device), use_cache=False, logits_to_keep=len(ids) - first)
        return out.logits[0, first - len(ids) :].float().log_softmax(-1)

    reference = log_probs(None, quantizer.variants[0])
    sums = torch.zeros(len(chosen), len(quantizer.variants), dtype=torch.float64)
    for i, layer in enumerate(chosen):
        for j, variant in enumerate(quantizer.variants):
            logp = log_probs(layer, variant)
            sums[i, j] = float(torch.nn.functional.kl_div(logp, reference, reduction="sum", log_target=True))
    return sums
