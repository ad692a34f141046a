"""Calibration on a random model: the statistics against their definitions, and what it buys."""

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows
from sglang_kvq.rotations.base import Rotations, check_rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.run import CalibrationSettings, calibrate, place_contexts, positions_of
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention, mean_kl
from sglang_kvq.rotations.maths.compose import balance, compose, compose_keys, oscar_permutation
from sglang_kvq.rotations.maths.hadamard import hadamard_matrix
from sglang_kvq.rotations.maths.moments import MomentSums
from sglang_kvq.rotations.maths.rope import check_turn, over_places, roped_layers, turn_of
from tests.rotations.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = dict(tokens=1024, context=512, clip_grid=(0.86, 1.0), clip_contexts=1, sensitivity_contexts=0)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(97, (1100,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("granularity", ["per-head", "per-layer"])
@pytest.mark.parametrize("composition", ["balanced", "offset", "oscar"])
def test_calibration_gives_rotations_of_the_model(model, ids, granularity, composition):
    seen = []
    settings = CalibrationSettings(**SETTINGS, granularity=granularity, composition=composition)
    rotations = calibrate(model, ids, settings, progress=lambda name, done, total: seen.append(name))
    check_rotations(rotations, layers=2, kv_heads=2, head_dim=64)
    assert rotations.granularity == granularity
    for clips in (rotations.meta.clip_k, rotations.meta.clip_v):
        assert len(clips) == 2 and set(clips) <= set(settings.clip_grid)
    assert rotations.meta.tokens == 1024 and rotations.meta.model["num_key_value_heads"] == 2
    assert list(dict.fromkeys(seen)) == ["moments", "clips"]
    assert model.config._attn_implementation != "kvq_capture"


def test_importance_follows_its_definition(model, ids):
    """Eigenvalues of mean QᵀQ and of Vᵀ diag(w) V, computed from one context's activations at once."""
    held = {}
    with torch.inference_mode(), attention_hook(model, lambda layer, *x: held.__setitem__(layer, x)):
        model.base_model(ids[None, :512])
    settings = CalibrationSettings(**{**SETTINGS, "tokens": 512}, positions=512)  # no other place than the first
    rotations = calibrate(model, ids[:512], settings)
    for layer, (q, k, v, _) in held.items():
        q, k, v = (x[:, settings.sink :].double() for x in (q, k, v))
        for head in range(2):
            group = torch.cat([q[2 * head], q[2 * head + 1]])
            importance = group.T @ group / len(group)
            w = torch.stack([row @ importance @ row for row in k[head]])
            sst = v[head].T @ torch.diag(w / w.mean()) @ v[head] / len(w)
            for eigen, matrix in ((rotations.k_eigenvalues, importance), (rotations.v_eigenvalues, sst)):
                torch.testing.assert_close(
                    eigen[layer, head].double(), torch.linalg.eigvalsh(matrix), rtol=1e-4, atol=1e-4
                )


def test_oscar_composition_is_u_h_p():
    x = torch.randn(200, 64, dtype=torch.float64)
    moment = x.T @ x
    values, u = torch.linalg.eigh(moment)
    order = values.argsort(descending=True)
    perm = torch.empty(64, dtype=torch.int64)
    for i in range(64):
        perm[int(f"{i:06b}"[::-1], 2)] = order[i]
    rotation, eigenvalues = compose("oscar", moment, moment)
    torch.testing.assert_close(rotation, (u @ hadamard_matrix(64) @ torch.eye(64).double()[:, perm]).float())
    torch.testing.assert_close(eigenvalues, values.float())


@pytest.mark.parametrize("n", [64, 96, 128])
def test_oscar_permutation_is_one(n):
    assert sorted(oscar_permutation(n).tolist()) == list(range(n))


def test_offset_composition_stores_a_common_part_for_free():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 64, generator=generator) + 4 * torch.randn(64, generator=generator)
    moment = (x.T @ x).double()
    errors = {}
    for name in ("offset", "oscar"):
        rotated = x @ compose(name, torch.eye(64, dtype=torch.float64), moment)[0]
        back = dequantize_rows(*quantize_rows(rotated.bfloat16(), 64, clip_rank(64, 0.9)))
        errors[name] = (back - rotated).square().mean()
    assert errors["offset"] < 0.2  # unit noise at 2 bits; the mean, of size 4, costs nothing
    assert errors["oscar"] > 3 * errors["offset"]


def test_contexts_spread_over_the_positions_served(model):
    settings = CalibrationSettings(tokens=4096, context=512)
    assert place_contexts(settings, 8, model.config)[:2] == [0, round(512 * (2 ** (1 / 7) - 1))]
    assert place_contexts(settings, 8, model.config)[-1] == 1024 - 512  # the model's own
    assert place_contexts(replace(settings, positions=8192), 8, model.config)[-1] == 8192 - 512
    assert place_contexts(settings, 1, model.config) == [0]
    with pytest.raises(KVQuantError, match="--positions 100: must be at least one --context, 512"):
        replace(settings, positions=100)


def test_a_contexts_place_turns_keys_and_leaves_scores(model, ids):
    held = {}
    for place in (0, 300):
        with torch.inference_mode(), attention_hook(model, lambda layer, *x: held.__setitem__((place, layer), x)):
            model.base_model(ids[None, :200], position_ids=positions(ids[:200], place))
    for layer in range(2):
        (q, k, *_), (turned_q, turned_k, *_) = (held[place, layer] for place in (0, 300))
        assert (k - turned_k).norm() > 0.1 * k.norm()
        torch.testing.assert_close(q[:2] @ k[:1].mT, turned_q[:2] @ turned_k[:1].mT, rtol=1e-3, atol=1e-3)


def test_moments_are_those_of_contexts_at_every_place(model, ids):
    """The model itself, run at each place, against one run at 0 and ``over_places``."""
    places = place_contexts(CalibrationSettings(**SETTINGS), 5, model.config)
    sums = {place: MomentSums(64) for place in places}
    for place in places:
        with torch.inference_mode(), attention_hook(model, lambda layer, q, k, v, s: sums[place].add(layer, q, k, v)):
            model.base_model(ids[None, :300], position_ids=positions(ids[:300], place))
    means = [sums[place].mean(2, 1, shared=False) for place in places]
    turn = turn_of(model.config, 64)
    for i in range(2):  # queries, keys
        there = torch.stack([mean[i] for mean in means]).mean(0)
        torch.testing.assert_close(over_places(means[0][i], turn, places), there, rtol=1e-3, atol=1e-3)
        assert (there - means[0][i]).norm() > 0.05 * there.norm()


def test_turns_cover_models_of_other_layouts():
    """Interleaved pairs and a part of head_dim (GLM), scaled cosines (YaRN)."""
    from transformers import Glm4Config, LlamaConfig

    scaled = LlamaConfig(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "rope_theta": 1e4,
        }
    )
    for config, turned in ((Glm4Config(head_dim=128), 64), (scaled, 128)):
        turn = turn_of(config, 128)
        identity = torch.eye(128, dtype=torch.float64)
        torch.testing.assert_close(turn(100) @ turn(57), turn(157), rtol=0, atol=1e-4)
        torch.testing.assert_close(turn(157) @ turn(157).T, identity, rtol=0, atol=1e-5)
        assert ((turn(1) - identity).abs().sum(0) > 1e-9).sum() == turned


def test_layers_without_rope_are_left_alone(ids):
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, no_rope_layers=[1, 0], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = SmolLM3ForCausalLM(config).eval()
    assert roped_layers(config, 2).tolist() == [True, False]
    calibrated = {
        most: calibrate(model, ids, CalibrationSettings(**SETTINGS, positions=most)).k_eigenvalues
        for most in (512, 4096)
    }
    torch.testing.assert_close(calibrated[512][1], calibrated[4096][1])
    assert not torch.allclose(calibrated[512][0], calibrated[4096][0], rtol=0.01)


def test_a_model_that_turns_keys_otherwise_is_refused(model, ids):
    check_turn(model, ids[:64], turn_of(model.config, 64), 512)
    with pytest.raises(KVQuantError, match="layer 0: at position 512 .* --positions equal to --context"):
        check_turn(model, ids[:64], lambda place: torch.eye(64, dtype=torch.float64), 512)


def test_a_model_without_the_usual_rope_is_refused():
    from transformers import OPTConfig

    with pytest.raises(KVQuantError, match="OPTConfig: .* --positions equal to --context"):
        turn_of(OPTConfig(), 64)


def test_positions_end_where_rope_changes():
    from transformers import LlamaConfig

    long = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    assert positions_of(LlamaConfig(max_position_embeddings=8192)) == 8192
    assert positions_of(LlamaConfig(max_position_embeddings=100_000)) == 32768
    assert positions_of(LlamaConfig(max_position_embeddings=16384, rope_parameters=long)) == 4096


def outliers(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that hold most where queries ask least, as with Qwen2.5's biases: float64 ``[512, 64]`` each."""
    spread = torch.logspace(-0.8, 0.8, 64, dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator))[0]
    q, k = (torch.randn(512, 64, dtype=torch.float64, generator=generator) for _ in "qk")
    return q / spread @ mix, k * spread @ mix


def moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def test_balanced_keys_and_queries_have_one_moment():
    q, k = outliers(torch.Generator().manual_seed(1))
    a = balance(moment(q), moment(k))
    torch.testing.assert_close(a, a.T)
    of_keys, of_queries = moment(k @ a), moment(q @ torch.linalg.inv(a))
    assert (of_keys - of_queries).norm() < 0.02 * of_keys.norm()


def test_balance_keeps_scores_and_makes_them_exacter():
    q, k = outliers(torch.Generator().manual_seed(2))
    error = {}
    for name in ("balanced", "offset"):
        r_k, r_q, _ = compose_keys(name, moment(q), moment(k))
        assert (r_q is None) == (name == "offset")
        r_q = r_k if r_q is None else r_q
        exact, turned, queries = q @ k.T, (k @ r_k.double()).bfloat16(), q @ r_q.double()
        torch.testing.assert_close(q @ r_q.double() @ (k @ r_k.double()).T, exact, rtol=1e-4, atol=1e-3)
        back = dequantize_rows(*quantize_rows(turned, 64, 0)).double()
        error[name] = ((queries @ back.T - exact).norm() / exact.norm()).item()
    assert error["balanced"] < 0.25 * error["offset"], error


def test_what_the_zero_point_stores_is_stretched():
    """A constant part of keys, as with biases: its direction's codes must not be what spoils scores."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(512, 64, dtype=torch.float64, generator=generator) for _ in "qk")
    direction = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64, generator=generator), dim=0)
    q, k = q + 6 * torch.randn(512, 1, dtype=torch.float64, generator=generator) * direction, k + 40 * direction
    a = balance(moment(q), moment(k))
    plain = a @ torch.linalg.eigh(a.T @ moment(k) @ a).eigenvectors.flip(-1) @ hadamard_matrix(64)
    stretched, _, _ = compose_keys("balanced", moment(q), moment(k))
    error = []
    for r_k in (plain, stretched.double()):
        back = dequantize_rows(*quantize_rows((k @ r_k).bfloat16(), 64, 0)).double()
        error.append((q @ torch.linalg.inv(r_k).mT @ back.T - q @ k.T).norm().item())
    assert error[1] < 0.8 * error[0], error


def test_a_direction_that_keys_or_queries_lack_does_no_harm():
    q, k = outliers(torch.Generator().manual_seed(3))
    q[:, 0] = 0
    k[:, 1] = 0
    r_k, r_q, _ = compose_keys("balanced", moment(q), moment(k))
    rotations = Rotations(r_k[None, None], torch.eye(64)[None, None], q=r_q[None, None])
    check_rotations(rotations, layers=1, kv_heads=1, head_dim=64)


def test_kl_counts_the_quantized_history_only(model, ids):
    h = hadamard_matrix(64).float().expand(2, 2, 64, 64)
    format = PageFormat(64, 64, 0.9, 0.92)
    kl = mean_kl(
        model,
        [ids[:600]],
        {
            "exact": FakeQuantAttention(None),
            "window only": FakeQuantAttention(format, LayerRotations(h, h), recent=640),
            "rotated": FakeQuantAttention(format, LayerRotations(h, h)),
        },
    )
    assert abs(kl["exact"]) < 1e-7 and abs(kl["window only"]) < 1e-6 < kl["rotated"]


def test_short_corpus(model, ids):
    with pytest.raises(KVQuantError, match="1100 tokens, calibration needs 2048"):
        calibrate(model, ids, CalibrationSettings(**{**SETTINGS, "tokens": 2048}))


def test_nan_activations(ids):
    broken = tiny_llama()
    broken.model.layers[1].self_attn.v_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(KVQuantError, match="layer 1: .* NaN or infinity"):
        calibrate(broken, ids, CalibrationSettings(**SETTINGS))


def test_unsupported_head_dim(ids):
    with pytest.raises(KVQuantError, match="head_dim 32"):
        calibrate(tiny_llama(dim=32), ids, CalibrationSettings(**SETTINGS))


def test_sliding_window_is_refused_and_the_model_restored(ids):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, sliding_window=128,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(KVQuantError, match="sliding_window=128"):
        calibrate(model, ids, CalibrationSettings(**SETTINGS))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "wrong", [dict(granularity="per-token"), dict(composition="x"), dict(context=256), dict(tokens=100)], ids=str
)
def test_settings_are_checked(wrong):
    with pytest.raises(KVQuantError, match=f"--{next(iter(wrong))}"):
        CalibrationSettings(**wrong)
