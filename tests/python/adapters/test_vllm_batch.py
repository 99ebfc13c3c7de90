"""Replicas for each batch in vLLM, against layers with the signatures of its release."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_vllm import FakeElastic, faked
from fake_vllm_batch import (
    LAYERS,
    NAMES,
    PADDING,
    E,
    FakeRouter,
    G,
    H,
    K,
    M,
    P,
    T,
    add_model,
    load,
    make_config,
    make_fake,
    registered,
    run_batch,
)
from ranks import RankPool, raised

from ultraep_comm import errors
from ultraep_comm.adapters import vllm as adapter
from ultraep_comm.adapters.vllm import batch, checks

# ---- batches -------------------------------------------------------------------------------


def draw(seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, weights and ids, most of them of experts 0 and 1, which are on one rank."""
    numbers = torch.Generator().manual_seed(50 * seed + rank)
    hot = torch.rand((T, E), generator=numbers) + torch.arange(E).lt(2) * 0.6
    weights, ids = hot.topk(K)
    return torch.randn((T, H), generator=numbers), weights, ids.to(torch.int32)


def run_dense(every: dict[str, torch.Tensor], x: Any, weights: Any, ids: Any) -> torch.Tensor:
    output = torch.zeros_like(x)
    for k in range(K):
        own = {name: tensor[ids[:, k].long()] for name, tensor in every.items()}
        y = torch.einsum("th,toh->to", x, own["w13_weight"].to(torch.float32))
        output += (y * own["w13_weight_scale"] + own["w13_bias"]) * weights[:, k, None]
    return output


def run_batches(rank: int, group: Any, gathers: bool, holds: str, real: int) -> list[Any]:
    found = []
    with registered(rank, LAYERS, group, gathers=gathers, target=1.0) as layers:
        for n, layer in enumerate(layers):
            load(layer, rank, n, 0)
            if holds:  # a kernel that has tensors of its own with a parameter's memory
                kernel = layer.quant_method.moe_kernel.fused_experts
                view = layer.w13_bias.data.view(P, H)
                kernel.quant_config._w1.bias = list(view) if holds == "rows" else view
        keys = [sorted(layer.state_dict()) for layer in layers]
        assert add_model(layers, group) is None
        sys.modules["vllm.distributed.eplb.eplb_state"].EplbState().rearrange()
        for number in range(3):
            for n, layer in enumerate(layers):
                every = load(layer, rank, n, number // 2)  # new weights before the last one
                x, weights, ids = draw(10 * number + n, rank if gathers else 0)
                router = checks.find_router(layer)
                router.eplb_state.num_unpadded_tokens_tensors[0].fill_(real)
                with torch.inference_mode():
                    rows = router._apply_eplb_mapping(ids)
                    output = layer.forward_modular(x, weights, topk_ids=rows)
                torch.testing.assert_close(output, run_dense(every, x, weights, ids))
                held = range(rank * M, (rank + 1) * M)
                for name in NAMES:
                    assert torch.equal(getattr(layer, name)[:M], every[name][held])
                assert torch.equal(layer.e_score_correction_bias, torch.arange(float(P)))
                mine = rows[:real].to(torch.int64)
                computed = torch.bincount(mine.flatten() // P, minlength=G)
                if gathers:
                    dist.all_reduce(computed, group=group)
                assert (rows[real:] % P < M).all()  # padding stays at home
                plan = layer.replica_plan
                assert (computed.max() / computed.double().mean()) == pytest.approx(plan.imbalance)
                found.append((plan.imbalance_before, plan.imbalance, plan.num_replicas))
                assert layer.replicas.are_copied == bool(holds)
        assert [sorted(layer.state_dict()) for layer in layers] == keys
        assert layers[0].state_dict()["w13_weight"].shape == (P, H, H)
        groups = {id(layer.replicas.balancer.group) for layer in layers}
    return [found, len(groups)]


@pytest.mark.parametrize(
    ("gathers", "holds", "real"),
    [
        (False, "", T),
        (True, "", T),
        (False, "a view", T),
        (False, "rows", T),
        (False, "", 40),
        (True, "", 40),
    ],
)
def test_outputs_are_those_without_replicas(
    ranks: RankPool, gathers: bool, holds: str, real: int
) -> None:
    """With tensor parallelism, or with tokens of its own on each rank; with padding."""
    for found, groups in ranks.run(G, run_batches, gathers, holds, real):
        assert groups == 1  # its slots are shared
        for before, after, replicas in found:
            assert before > 1.4
            assert after <= 1.02
            assert replicas > 0


def run_lonely(rank: int, group: Any, min_tokens: int) -> list[Any]:
    """All tokens go to rank 0's experts: with plans others compute, without they have nothing."""
    with registered(rank, 1, group, gathers=True, min_tokens=min_tokens) as (layer,):
        every = load(layer, rank, 0, 0)
        add_model([layer], group)
        x, weights, ids = draw(0, rank)
        ids = ids % M
        for _ in range(2):
            rows = layer.replicas.begin(ids)
            output = layer.forward_modular(x, weights, rows)
            torch.testing.assert_close(output, run_dense(every, x, weights, ids))
        runs = layer.quant_method.moe_kernel.fused_experts.runs
        return [layer.replica_plan.num_replicas, runs]


def test_small_batches_move_nothing(ranks: RankPool) -> None:
    found = ranks.run(G, run_lonely, G * T * K + 1)
    assert found == [[0, 2], [0, 0], [0, 0], [0, 0]]
    found = ranks.run(G, run_lonely, G * T * K)
    assert all(replicas > 0 and runs == 2 for replicas, runs in found)


def run_padded(rank: int, group: Any, gathers: bool) -> list[Any]:
    """Run batches whose padding vLLM tells by a mask; the number is the one of an earlier batch."""
    found = []
    with registered(rank, 1, group, gathers=gathers, target=1.0) as (layer,):
        every = load(layer, rank, 0, 0)
        add_model([layer], group)
        for real in (40, 0, T):  # the second is a dummy run
            PADDING[0] = torch.arange(T) >= real
            x, weights, ids = draw(0, rank if gathers else 0)
            rows = layer.replicas.begin(ids)
            output = layer.forward_modular(x, weights, rows)
            torch.testing.assert_close(output, run_dense(every, x, weights, ids))
            assert (rows[real:] % P < M).all()
            plan = layer.replica_plan
            found.append([int(plan.load.sum()), plan.num_replicas > 0])
    PADDING[0] = None
    return found


@pytest.mark.parametrize("gathers", [False, True])
def test_padding_counts_in_no_batch(ranks: RankPool, gathers: bool) -> None:
    all_tokens = K * (G if gathers else 1)
    for found in ranks.run(G, run_padded, gathers):
        assert found == [[40 * all_tokens, True], [0, False], [T * all_tokens, True]]


def differ_in_layout(rank: int, group: Any) -> int:
    """Run layers of two layouts, which vLLM's own EPLB cannot move."""
    with registered(rank, 3) as layers:
        layers[1].w13_bias = torch.nn.Parameter(torch.zeros(P, H + 1), requires_grad=False)
        add_model(layers, group)
        ids = torch.zeros(4, K, dtype=torch.int64)
        for layer in layers:
            layer.w13_bias.fill_(rank)
            run_batch(layer, ids)
            held = layer.replica_plan.slot_expert[rank]
            homes = layer.w13_bias[M:][held >= 0][:, 0]
            assert torch.equal(homes, (held[held >= 0] // M).to(torch.float32))
        return len({id(layer.replicas.balancer.group) for layer in layers})


def test_layers_may_have_different_layouts(ranks: RankPool) -> None:
    assert ranks.run(G, differ_in_layout) == [2] * G


def come_again(rank: int, group: Any) -> int:
    """Set up a model after vLLM failed behind another's first layers."""
    with registered(rank, 3) as layers:
        for layer in layers[:2]:
            layer.get_expert_weights()
        del layer, layers[0]
        add_model(layers, group)
        return sum(layer.replicas is not None for layer in layers)


def test_a_failed_set_up_leaves_no_layers_behind(ranks: RankPool) -> None:
    assert ranks.run(G, come_again) == [2] * G


# ---- what is refused -----------------------------------------------------------------------


@pytest.fixture
def layer() -> Iterator[Any]:
    with registered() as (made,):
        yield made


def without_scale(layer: Any) -> None:
    layer.w13_weight.data = layer.w13_weight.data.to(torch.float8_e4m3fn)
    del layer.w13_weight_scale
    layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = None


def give_bias(layer: Any, value: torch.Tensor) -> None:
    layer.w13_bias = torch.nn.Parameter(value, requires_grad=False)


# What happens to the second layer of rank 1, and what every rank is told.
SPOILED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no rows": (
        lambda m: give_bias(m, torch.zeros(P + 1, H)),
        "a parameter w13_bias of shape (5, 6), without a row for each of 4",
    ),
    "shared rows": (
        lambda m: give_bias(m, torch.zeros(H).expand(P, H)[:, :]),
        "a parameter w13_bias of shape (4, 6), whose rows share memory",
    ),
    "no scale": (
        without_scale,
        "w13_weight is of torch.float8_e4m3fn, and no parameter w13_...scale exists",
    ),
    "opaque": (
        lambda m: setattr(
            m.quant_method.moe_kernel.fused_experts.quant_config._w1, "scale", object()
        ),
        "its quant_method.moe_quant_config._w1.scale is a object, which would stay",
    ),
    "inside": (
        lambda m: m.add_module("norm", torch.nn.LayerNorm(H)),
        "a parameter norm.weight of shape (6,), of a module inside",
    ),
}


def set_up(rank: int, group: Any, kind: str) -> str:
    with registered(rank, 2) as layers:
        if rank == 1:
            SPOILED[kind][0](layers[1])
        before = [p.data_ptr() for layer in layers for p in layer.parameters()]
        error = raised(lambda: add_model(layers, group))
        assert before == [p.data_ptr() for layer in layers for p in layer.parameters()]
        assert all(layer.replicas is None for layer in layers)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", SPOILED)
def test_what_would_stay_behind_is_an_error_on_every_rank(ranks: RankPool, kind: str) -> None:
    for text in ranks.run(G, set_up, kind):
        assert text.startswith("UnsupportedError: MoE layer 1 of expert-parallel rank 1 cannot")
        assert SPOILED[kind][1] in text


def parallel(layer: Any) -> Any:
    return layer.moe_config.moe_parallel_config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m.vllm_config.parallel_config, "use_ubatching", True), "dual-batch"),
        (
            lambda m: setattr(parallel(m), "use_moonep_kernels", True),
            "all2all_backend='allgather_reducescatter' dispatches inside",
        ),
        (lambda m: setattr(m.moe_config, "is_lora_enabled", True), "LoRA"),
        (lambda m: setattr(m.moe_config, "num_logical_experts", G * P), "no row for a replica"),
        (lambda m: setattr(m.quant_method, "is_monolithic", True), "its kernel routes by itself"),
        (
            lambda m: setattr(m.expert_map_manager, "placement_strategy", "round_robin"),
            "expert_placement_strategy='round_robin'",
        ),
        (
            lambda m: m.vllm_config.compilation_config.static_forward_context.update(
                {m.layer_name: SimpleNamespace(router=object())}
            ),
            "its router is a object",
        ),
    ],
)
def test_settings_and_layers_that_are_refused(
    layer: Any, change: Callable[[Any], None], says: str
) -> None:
    assert layer.moe_config.require_decomposed_backend
    assert checks.describe(layer)
    change(layer)
    assert says in str(raised(lambda: checks.describe(layer)))


def test_layers_of_other_classes_are_refused(layer: Any) -> None:
    group = SimpleNamespace(size=lambda: 2)
    other = SimpleNamespace(get_expert_weights=lambda: [torch.zeros(1)])
    for layers in ([layer, other], [other]):
        with pytest.raises(
            errors.UnsupportedError, match=f"{len(layers) - 1} of {len(layers)} MoE"
        ):
            add_model(layers, group)
    with pytest.raises(errors.UnsupportedError, match="ULTRAEP_VLLM=batch: elastic"):
        sys.modules["vllm.distributed.eplb.eplb_state"].create_eplb_communicator(
            FakeElastic(), "nixl", [[]], []
        )


def test_options(layer: Any) -> None:
    config = layer.vllm_config
    config.additional_config = {"ultraep": {"cost": {"token": 1e-9, "expert_byte": 1e-12}}}
    assert checks.read_options(layer)["cost"].token == 1e-9
    config.additional_config = {"ultraep": {"slots": 2}}
    with pytest.raises(errors.InvalidArgumentError, match=r"option \['slots'\]; expected some of"):
        checks.read_options(layer)


def move(rank: int, group: Any) -> str:
    with registered(rank) as (layer,):
        add_model([layer], group)
        ids = torch.zeros(4, K, dtype=torch.int64)
        run_batch(layer, ids)
        layer.w13_bias.data = layer.w13_bias.data.clone()
        error = raised(lambda: layer.replicas.begin(ids))
    return f"{type(error).__name__}: {error}"


def test_weights_that_have_moved_are_an_error(ranks: RankPool) -> None:
    for rank, text in enumerate(ranks.run(G, move)):
        assert text.startswith(f"InvalidWeightsError: rank {rank}: w13_bias of layers.0 has moved")


# ---- the plugin ----------------------------------------------------------------------------


@pytest.mark.usefixtures("layer")
def test_rows_are_mains_then_slots() -> None:
    state = sys.modules["vllm.distributed.eplb.eplb_state"].EplbState
    rows = state.build_initial_global_physical_to_logical_map
    assert rows(8, 8) == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1]
    assert rows(7, 0) == list(range(7))
    with pytest.raises(errors.UnsupportedError, match=r"=6 on 4 ranks; .* 4, such as 8"):
        rows(8, 6)
    says = (
        "ULTRAEP_VLLM=batch: 18 experts on 4 ranks; expected as many experts on each rank, with 2,"
        " 3, 6, 9, 18 ranks. Or set ULTRAEP_VLLM=eplb, for which num_redundant_experts=2 will do"
    )
    with pytest.raises(errors.UnsupportedError, match=says):
        rows(18, 4)


def test_it_registers_once() -> None:
    with faked("batch", make_fake(make_config())):
        adapter.register()
        adapter.register()
    with faked("batch", make_fake(make_config())):
        register = sys.modules["vllm.model_executor.custom_op"].PluggableLayer.register_oot
        register(name="RoutedExperts")(object)
        with pytest.raises(errors.UnsupportedError, match="another plugin"):
            adapter.register()


def test_other_releases_are_noticed() -> None:
    class Router(FakeRouter):
        def _apply_eplb_mapping(self, ids: Any) -> Any: ...

    says = r"_apply_eplb_mapping takes .*'ids'"
    with (
        faked("batch", make_fake(make_config(), BaseRouter=Router)),
        pytest.raises(errors.UnsupportedError, match=says),
    ):
        adapter.register()


def test_where_it_leaves_vllm_alone(layer: Any) -> None:
    layer.moe_config.moe_parallel_config.ep_size = 1
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert layer.get_expert_weights() == ["vLLM's"]
    assert add_model([layer], alone) == "vLLM's torch_gloo"
    assert layer.replicas is None
    assert layer.replica_plan is None
    layer.moe_config.moe_parallel_config.enable_eplb = False
    with pytest.warns(UserWarning, match="nothing is replicated without --enable-eplb"):
        made = type(layer)("plain", torch.bfloat16, layer.moe_config)
    assert isinstance(made, batch.Experts)
