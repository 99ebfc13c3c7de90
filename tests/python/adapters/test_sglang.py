"""SGLang's EPLB over the library, and replicas for each batch, by a fake of SGLang."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_sglang
import pytest
import torch
import torch.distributed as dist
from eplb_rows import count_wrong, make_rows, random_map
from fake_sglang import FusedMoE, faked
from ranks import MAX_RANKS, RankPool, raised

from ultraep_comm import errors
from ultraep_comm.adapters import rows
from ultraep_comm.adapters import sglang as adapter

UPDATER = "eplb.expert_location_updater"


@contextlib.contextmanager
def serving(mode: str, group: Any = None, redundant: int = 0) -> Iterator[Any]:
    """Return the modules of an SGLang that has the plugin, by path."""
    with faked(mode, group, redundant) as sglang:
        adapter.register()
        sglang("plugins.hook_registry").HookRegistry.apply_hooks()
        yield sglang


# ---- EPLB ----------------------------------------------------------------------------------


def update_often(rank: int, _: Any, experts: int, local: int) -> list[Any]:
    generator = torch.Generator().manual_seed(experts)  # the same on every rank
    count, mine = local * MAX_RANKS, slice(rank * local, (rank + 1) * local)
    old, wrong, lines = random_map(generator, experts, count), 0, 0
    layer, missing, metrics = make_rows(old[mine]), [], []
    handler = logging.Handler()
    handler.emit = lambda record: metrics.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ultraep_comm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with serving("eplb") as sglang:
        module = sglang(UPDATER)
        assert module.create_temp_buffers(layer) == []
        for turn in range(6):
            new = random_map(generator, experts, count) if turn else old[::-1]  # whole cycles
            found = module.update_expert_weights_single_layer(
                routed_experts_weights=layer,
                temp_buffers=[],
                old_physical_to_logical_map=old,
                new_physical_to_logical_map=new,
                num_local_physical_experts=local,
                num_gpu_per_node=MAX_RANKS,
                rank=rank,
                missing_logical_experts_info=missing,
                debug=turn > 0,
                log_metrics=turn == 0,
            )
            wrong += count_wrong(layer, new[mine])
            changed = sum(a != b for a, b in zip(old[mine], new[mine], strict=True))
            lines += (found is None) != (turn == 0) or (turn > 0 and len(found) != changed)
            old = new
    logger.removeHandler(handler)
    received = [text for text in metrics if text.startswith("SGLang's EPLB: ")]
    return [wrong, lines, missing, len(received)]


@pytest.mark.parametrize(("experts", "local"), [(8, 3), (2, 1), (16, 2)])
def test_every_row_of_random_updates(ranks: RankPool, experts: int, local: int) -> None:
    for found in ranks.run(MAX_RANKS, update_often, experts, local):
        assert found == [0, 0, [], 1]


def refuse(rank: int, _: Any, kind: str) -> list[str]:
    count, missing = 2 * MAX_RANKS, 99
    old = list(range(count))
    new, layer, given = old[::-1], [torch.full((2, 3), float(rank))], rank
    if kind == "tensor" and rank == 1:
        layer.append(torch.zeros(1))
    elif kind == "shared" and rank == 1:
        layer[0] = torch.zeros(3).expand(2, 3)
    elif kind == "rank" and rank == 1:
        given = 0
    elif kind == "length":
        old, new = old[:-1], new[:-1]
    elif kind == "maps" and rank == 1:
        new = old[1:] + old[:1]
    elif kind == "nowhere":
        new[3] = missing
    with serving("eplb") as sglang, pytest.MonkeyPatch.context() as context:
        if kind == "elastic" and rank == 1:
            context.setattr(fake_sglang.ElasticEPStateManager, "state", object())
        update = sglang(UPDATER).update_expert_weights_single_layer
        before = [w.clone() for w in layer]
        error = raised(lambda: update(layer, [], old, new, 2, MAX_RANKS, given))
    assert all(torch.equal(a, b) for a, b in zip(layer, before, strict=True))
    return [type(error).__name__, str(error)]


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("tensor", "UnsupportedError", "rank 1 has tensors of shapes [(2, 3), (1,)], not with 2"),
        ("shared", "UnsupportedError", "rank 1 has a tensor 0 of layer 0 with shape (2, 3), whose"),
        ("rank", "UnsupportedError", "rank 1 is rank 1 of WORLD, and 0 of SGLang's EPLB"),
        ("length", "UnsupportedError", "rank 0 has a map of 15 rows; expected 16"),
        ("elastic", "UnsupportedError", "rank 1 has elastic expert parallelism"),
        ("maps", "PlanMismatchError", "EPLB of rank 1 has other maps of experts than rank 0's"),
        ("nowhere", "InvalidPlanError", "EPLB puts expert 99 into row 3, and no row has it"),
    ],
)
def test_what_cannot_move_is_an_error_on_every_rank_and_moves_nothing(
    ranks: RankPool, kind: str, error: str, says: str
) -> None:
    for name, text in ranks.run(MAX_RANKS, refuse, kind):
        assert name == error
        assert says in text


def test_a_rank_gets_an_expert_once_and_from_near() -> None:
    # Two domains of two ranks with three rows each; expert 0 is in both of them.
    old = [0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 5]
    new = [1, 0, 2, 0, 0, 4, 0, 6, 7, 0, 3, 0]
    sources, fills = rows.plan_update(old, new, 3, [0, 0, 1, 1])
    assert sources == [1, 0, -1, 0, -1, 4, -1, -1, -1, 6, 3, -1]
    assert fills == [0, 1, -1, 0, 0, 2, -1, -1, -1, 0, 1, 0]
    # Of two ranks with an expert each gives it once.
    sources, _ = rows.plan_update([0, 1, 0, 2, 3, 4, 5, 6], [0, 1, 0, 2, 0, 4, 0, 6], 2, [0] * 4)
    assert sources == [-1, -1, -1, -1, 0, -1, 2, -1]


# ---- replicas for each batch ---------------------------------------------------------------

EXPERTS, SLOTS, TOKENS, TOPK, LAYERS = 8, 2, 40, 3, 2


def make_model(rank: int, group: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"w13_weight": (5, 8), "w2_weight": (8, 5), "scale": ()}
    whole = [
        {n: torch.randn(EXPERTS, *shape, generator=generator) / 2 for n, shape in shapes.items()}
        for _ in range(LAYERS)
    ]
    model = torch.nn.ModuleList(
        [FusedMoE(EXPERTS + SLOTS * group.size(), 8, 5, i) for i in range(LAYERS)]
    )
    for layer, weights in zip(model, whole, strict=True):
        layer.load(weights, rank)
    return model, whole


def locate(sglang: Any, rank: int) -> SimpleNamespace:
    config = SimpleNamespace(experts=EXPERTS, layers=LAYERS)
    fake_sglang.STATE.locations = sglang(
        "eplb.expert_location"
    ).compute_initial_expert_location_metadata(model_config=config, moe_ep_rank=rank)
    return config


def prepare(sglang: Any, model: Any, config: Any) -> None:
    module = sglang("model_executor.model_runner_components.moe_ep_setup")
    module.prepare_moe_topk(model=model, model_config=config)


def route(
    sglang: Any, ids: Any, weights: Any, layer: int, count: Any = None, compiled: bool = False
) -> Any:
    return sglang("layers.moe.topk")._post_process_topk_ids(
        topk_ids=ids,
        topk_weights=weights,
        topk_config=None,
        router_logits=None,
        layer_id=layer,
        num_token_non_padded=count,
        expert_location_dispatch_info=object(),
        padded_rows_masked=compiled,
    )[0]


def serve(rank: int, group: dist.ProcessGroup) -> list[Any]:
    """Return errors of outputs, plans' imbalances before and after, and rows computed."""
    generator = torch.Generator().manual_seed(6)  # all ranks have the same tokens
    found, imbalances, computed = [], [], []
    with serving("batch", group, SLOTS * group.size()) as sglang:
        config = locate(sglang, rank)
        model, whole = make_model(rank, group)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        prepare(sglang, model, config)
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
        assert model[0].ultraep.group is model[1].ultraep.group
        for batch in range(4):
            tokens = TOKENS if batch < 3 else 0
            real = tokens - 15 if batch == 1 else tokens
            for layer, weights in zip(model, whole, strict=True):
                x = torch.randn(tokens, 8, generator=generator)
                skewed = torch.rand(tokens, EXPERTS, generator=generator) / torch.arange(
                    1, EXPERTS + 1
                )
                ids = skewed.topk(TOPK, 1).indices.to(torch.int32)
                ids[real:] = 0  # padding, which SGLang masks after the mapping
                scale = torch.rand(tokens, TOPK, generator=generator)
                if tokens:  # SGLang's models skip the router of an empty batch
                    count = torch.tensor(real) if batch == 1 else None
                    physical = route(sglang, ids.clone(), scale, layer.layer_id, count, batch == 2)
                    plan = layer.ultraep.plan
                    assert int(plan.load.sum()) == real * TOPK
                    imbalances.append((plan.imbalance_before, plan.imbalance))
                else:
                    physical = ids
                y = layer(x, scale, physical, group)
                computed.append(fake_sglang.STATE.computed)
                hidden = torch.einsum("th,eih->tei", x, weights["w13_weight"]).tanh()
                each = torch.einsum(
                    "tei,ehi,e->teh", hidden, weights["w2_weight"], weights["scale"]
                )
                each = each.gather(1, ids.long()[..., None].expand(-1, -1, 8))
                expected = (each * scale[..., None]).sum(1)
                expected[real:] = 0
                found.append(float((y - expected).abs().max()) if tokens else 0.0)
            if batch == 0:  # weights are loaded again: into slots too, and into new parameters
                for layer, weights in zip(model, whole, strict=True):
                    for name in weights:
                        weights[name] = weights[name] + 1
                        fresh = torch.full_like(getattr(layer, name), torch.nan)
                        setattr(layer, name, torch.nn.Parameter(fresh, requires_grad=False))
                    layer.load(weights, rank)
        local_experts = slice(
            rank * (EXPERTS // group.size()), (rank + 1) * (EXPERTS // group.size())
        )
        for layer, weights in zip(model, whole, strict=True):  # homes have not moved
            for name, value in weights.items():
                own = getattr(layer, name)[: EXPERTS // group.size()]
                assert torch.equal(own, value[local_experts])
        assert fake_sglang.STATE.graphs == 0  # SGLang's compiler has seen nothing of it
    return [max(found), imbalances, computed]


def test_outputs_are_those_without_replicas_and_ranks_compute_as_much(ranks: RankPool) -> None:
    results = ranks.run(4, serve)
    imbalances = results[0][1]
    assert all(error < 1e-4 for error, *_ in results)
    assert all(result[1] == imbalances for result in results)
    assert min(before for before, _ in imbalances) > 1.2
    assert max(after for _, after in imbalances) < 1.05
    for number, rows_of_ranks in enumerate(zip(*(r[2] for r in results), strict=True)):
        routed = (TOKENS - 15 if number in (2, 3) else TOKENS) * TOPK
        assert sum(rows_of_ranks) == (routed if number < 6 else 0)
        assert max(rows_of_ranks) <= 1.05 * routed / 4 + 1


def set_up_wrong(rank: int, group: dist.ProcessGroup, kind: str, where: int) -> str:
    redundant = {"no slots": 0, "uneven": -EXPERTS % 3}.get(kind, SLOTS * group.size())
    with serving("batch", group, redundant) as sglang:
        settings = fake_sglang.STATE.config
        if kind == "location":
            settings.moe.init_expert_location = "file.json"
        config = locate(sglang, rank)
        model = torch.nn.ModuleList([FusedMoE(EXPERTS + redundant, 8, 5, 0)])
        if where in (rank, -1):
            if kind == "all-to-all":
                settings.moe.moe_a2a_backend = "deepep"
            elif kind == "eplb":
                settings.moe.enable_eplb = True
            elif kind == "algorithm":
                settings.moe.ep_dispatch_algorithm = None
            elif kind == "overlap":
                settings.overlap.enable_two_batch_overlap = True
            elif kind == "graphs":
                settings.graph.cuda_graph_config.decode.backend = "full"
            elif kind == "shared":
                model[0].num_fused_shared_experts = 1
            elif kind == "model":
                fake_sglang.STATE.locations = None
            elif kind == "bias":
                model[0].w2_bias = torch.zeros(3)
            elif kind == "derived":
                model[0].quant_method = SimpleNamespace(alphas=[torch.arange(6.0)])
            elif kind == "constant":
                model[0].quant_method = SimpleNamespace(limit=7.0, strides=torch.full((6,), 8))
        elif kind == "constant":
            model[0].quant_method = SimpleNamespace(limit=5.0, strides=torch.full((6,), 8))
        error = raised(lambda: prepare(sglang, model, config))
        assert not hasattr(model[0], "ultraep")
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "where", "says"),
    [
        ("all-to-all", -1, "route different tokens; set --moe-a2a-backend none"),
        ("eplb", -1, "unset --enable-eplb"),
        ("algorithm", -1, "--ep-dispatch-algorithm None; set it to dynamic"),
        ("overlap", -1, "unset --enable-two-batch-overlap"),
        ("graphs", -1, "set --disable-decode-cuda-graph"),
        ("shared", 1, "set --disable-shared-experts-fusion"),
        ("model", -1, "SGLang knows no expert locations of this model"),
        ("location", -1, "leave --init-expert-location"),
        ("no slots", -1, "set --ep-num-redundant-experts to a multiple of 2"),
        ("bias", 1, "tensor w2_bias"),
        (
            "derived",
            1,
            "its quant_method.alphas.0 of shape (6,) with [0.0, 1.0, 2.0, 3.0,",
        ),
    ],
)
def test_settings_and_layers_that_do_not_go_with_replicas(
    ranks: RankPool, kind: str, where: int, says: str
) -> None:
    for text in ranks.run(2, set_up_wrong, kind, where):
        rank = max(where, 0)
        assert text.startswith(
            f"UnsupportedError: MoE layer 0 of expert-parallel rank {rank} cannot have replicas: "
        )
        assert says in text


def test_constants_have_to_be_equal_on_all_ranks(ranks: RankPool) -> None:
    for text in ranks.run(2, set_up_wrong, "constant", 1):
        assert text.startswith(
            "UnsupportedError: expert-parallel rank 1 has MoE layers with experts"
            " [['quant_method.limit', 7.0]], and rank 0 [['quant_method.limit', 5.0]]"
        )


def test_ranks_with_unequal_shares_are_refused(ranks: RankPool) -> None:
    for text in ranks.run(3, set_up_wrong, "uneven", -1):
        assert "it has 8 experts on 3 ranks; expected as many experts on each rank, with" in text
        assert "2, 4, 8 ranks (--ep-size). Or set ULTRAEP_SGLANG=eplb" in text
        assert "multiple of" not in text  # SGLang wants a multiple of both together


def misuse(rank: int, group: dist.ProcessGroup) -> list[Any]:
    x, scale, ids = torch.zeros(4, 8), torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.int32)
    with serving("batch", group, SLOTS * group.size()) as sglang:
        config = locate(sglang, rank)
        model, _ = make_model(rank, group)
        draft = FusedMoE(EXPERTS + SLOTS * group.size(), 8, 5, 0)
        draft.uses_expert_location = False
        prepare(sglang, torch.nn.ModuleList([draft]), config)
        prepare(sglang, model, config)
        physical = route(sglang, ids, scale, 1)
        model[1](x, scale, physical, group)
        map_ids = sglang("eplb.expert_location_dispatch").topk_ids_logical_to_physical
        found = [raised(lambda: model[0](x, scale, ids, group)), raised(lambda: map_ids(ids, 1))]
        assert map_ids(ids, None) is ids
        draft(x, scale, ids, group)
        assert fake_sglang.STATE.prepared == 2
    return [f"{type(error).__name__}: {error}" for error in found]


def test_other_ways_through_a_layer_are_errors(ranks: RankPool) -> None:
    for inside, hashed in ranks.run(2, misuse):
        assert inside.startswith("UnsupportedError: ULTRAEP_SGLANG=batch: layer 0 routes inside")
        assert hashed.startswith("UnsupportedError: ULTRAEP_SGLANG=batch: a router other than")


# ---- the plugin ----------------------------------------------------------------------------


def test_other_releases_are_noticed() -> None:
    def create_temp_buffers(tensors: Any) -> None: ...

    with faked("eplb", create_temp_buffers=create_temp_buffers) as sglang:
        with pytest.raises(errors.UnsupportedError, match=r"create_temp_buffers takes .*'tensors'"):
            adapter.register()
        assert sglang("plugins.hook_registry").HookRegistry.hooks == []


def leave_alone(rank: int, group: dist.ProcessGroup) -> list[Any]:
    with serving("batch", group, 2) as sglang:
        config = locate(sglang, rank)
        model = torch.nn.ModuleList([FusedMoE(EXPERTS + 2, 8, 5, 0)])
        prepare(sglang, model, config)
        own = fake_sglang.STATE.locations.physical_to_logical_map_cpu[0].tolist()
    return [own, hasattr(model[0], "ultraep")]


def test_one_rank_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(1, leave_alone) == [[[*range(EXPERTS), 0, 1], False]]
    with serving("eplb") as sglang:
        module, world = sglang(UPDATER), dist.group.WORLD
        try:
            dist.group.WORLD = dist.ProcessGroup(dist.HashStore(), 0, 1)
            (buffer,) = module.create_temp_buffers([torch.zeros(2)])
            own = module.update_expert_weights_single_layer([], [], [], [], 1, 1, 0)
        finally:
            dist.group.WORLD = world
    assert buffer.shape == (2,)
    assert own == "SGLang's own"
