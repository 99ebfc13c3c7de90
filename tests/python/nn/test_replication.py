"""A layer with its own dispatch: Replication in processes, against the same layer without ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from ranks import RankPool, loopback, raised
from token_exchange import Mesh, send
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ultraep_comm as uec
from ultraep_comm import errors
from ultraep_comm.nn import ReplicatedExperts, Replication
from ultraep_comm.nn.weights import local_weights, unbind_slots
from ultraep_comm.testing import new_loopback_groups

G, E, H, F, K, S = 4, 8, 6, 10, 2, 2
M, P = E // G, E // G + S
NAMES = ("w1", "w2", "bias")
Weights = dict[str, Any]


def shapes() -> dict[str, tuple[int, ...]]:
    return {"w1": (F, H), "w2": (H, F), "bias": (F,)}


def all_weights(layer: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(layer)
    return {n: torch.randn((E, *s), generator=draw) / 3 for n, s in shapes().items()}


def routing(rank: int, layer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with hot experts and their weights. Rank 2 has no tokens."""
    draw = torch.Generator().manual_seed(1000 * layer + 10 * step + rank)
    num_tokens = 0 if rank == 2 else 24
    popularity = torch.rand((num_tokens, E), generator=draw) + torch.arange(E).lt(2) * 0.7
    return popularity.topk(K).indices, torch.rand((num_tokens, K), generator=draw)


def tokens(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(77 + 10 * step + rank)
    return torch.randn((0 if rank == 2 else 24, H), generator=draw)


def run_expert(x: torch.Tensor, w1: Any, w2: Any, bias: Any) -> torch.Tensor:
    return torch.tanh(x @ w1.T + bias) @ w2.T


def layer_forward(
    replication: Replication,
    weights: Weights,
    x: torch.Tensor,
    route: tuple[torch.Tensor, torch.Tensor],
    pg: Any,
    as_map: bool,
    **options: Any,
) -> torch.Tensor:
    ids, probs = route
    if as_map:
        dense = torch.zeros((len(ids), E)).scatter(1, ids, probs)
        routed = torch.zeros((len(ids), E), dtype=torch.bool).scatter(1, ids, True)
        run = replication.begin(weights, routing_map=routed, probs=dense, **options)
        assert run.routing_map is not None
        assert run.probs is not None
        physical = run.routing_map.nonzero()[:, 1].view(-1, K)
        probs = run.probs.gather(1, physical)
    else:
        run = replication.begin(weights, ids, **options)
        assert run.topk_ids is not None
        physical = run.topk_ids
    x = run.before_dispatch(x)
    sent = send(x, physical, G * P, Mesh(pg))
    rows, local, slots = run.before_experts(sent.rows)
    out = [rows.new_zeros(0, H)]
    at = [torch.empty(0, dtype=torch.int64)]
    for i in range(P):
        held, j = (local, i) if i < M else (slots, i - M)
        at.append((sent.local == i).nonzero()[:, 0])
        if len(at[-1]):  # slots without tokens may hold anything
            out.append(run_expert(rows[at[-1]], *(held[n][j] for n in NAMES)))
    y = run.after_experts(torch.cat(out)[torch.cat(at).argsort()])
    return run.after_combine(x + (sent.give_back(y, K) * probs[..., None]).sum(1))


def expected(num_layers: int, steps: list[int]) -> tuple[dict[Any, torch.Tensor], list[Weights]]:
    """Return outputs by (rank, step), and the weights with their gradients, without ranks."""
    layers = [{n: w.requires_grad_() for n, w in all_weights(i).items()} for i in range(num_layers)]
    outputs = {}
    for step in steps:
        for rank in range(G):
            x = tokens(rank, step)
            for i, own in enumerate(layers):
                ids, probs = routing(rank, i, step)
                combined = torch.zeros_like(x)
                for e in range(E):
                    t, k = (ids == e).nonzero(as_tuple=True)
                    y = run_expert(x[t], *(own[n][e] for n in NAMES))
                    combined = combined.index_add(0, t, y * probs[t, k][:, None])
                x = x + combined
            outputs[rank, step] = x.detach()
            x.square().sum().backward()
    return outputs, layers


def own_weights(form: str, rank: int, layer: int, pg: Any = None) -> Weights:
    mine = {n: w[rank * M : (rank + 1) * M].clone() for n, w in all_weights(layer).items()}
    if form == "sequences":
        return {n: [torch.nn.Parameter(row.clone()) for row in w] for n, w in mine.items()}
    if form == "flattened":
        return {n: torch.nn.Parameter(w.flatten(0, 1).contiguous()) for n, w in mine.items()}
    if form == "distributed":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(pg, "cpu")
        mine = {n: DTensor.from_local(w, mesh, [Shard(0)]) for n, w in mine.items()}
    return {n: torch.nn.Parameter(w) for n, w in mine.items()}


def gradient(value: Any, like: torch.Tensor) -> torch.Tensor:
    found = value if isinstance(value, torch.Tensor) else torch.stack([v.grad for v in value])
    grad = found.grad if isinstance(value, torch.Tensor) else found
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    return grad.reshape(like.shape)


@contextmanager
def opened(pg: Any, **options: Any) -> Iterator[uec.Group]:
    group = uec.new_group(
        pg,
        num_experts=E,
        slots_per_rank=S,
        expert={n: (s, torch.float32) for n, s in shapes().items()},
        grads=torch.float32,
        timeout=30.0,
        **options,
    )
    with group:
        yield group


def train(
    rank: int,
    pg: Any,
    engine: str,
    form: str,
    as_map: bool,
    recompute: str | None,
    group_options: dict[str, Any],
    layer_options: list[dict[str, Any]],
    interleaved: bool,
) -> None:
    num_layers, steps = len(layer_options), [0, 1, 2]
    layers = [own_weights(form, rank, i, pg) for i in range(num_layers)]
    outputs, reference = expected(num_layers, steps)
    with opened(pg, engine=engine, **group_options) as group:
        calls = [Replication(group, layer=i, **o) for i, o in enumerate(layer_options)]

        def one(i: int, x: torch.Tensor, step: int) -> torch.Tensor:
            def run(x: torch.Tensor) -> torch.Tensor:
                return layer_forward(
                    calls[i], layers[i], x, routing(rank, i, step), pg, as_map, microbatch=step
                )

            if recompute is None:
                return run(x)
            if recompute == "selective":  # counts the operations of both passes
                return checkpoint(run, x, use_reentrant=False, context_fn=saving_products)
            return checkpoint(run, x, use_reentrant=recompute == "reentrant")

        def forward(step: int) -> torch.Tensor:
            x = tokens(rank, step).requires_grad_()
            for i in range(num_layers):
                x = one(i, x, step)
            return x

        with torch.no_grad():  # saves nothing
            for step in steps:
                torch.testing.assert_close(forward(step), outputs[rank, step])
        group.assert_idle()
        if interleaved:
            started = [forward(step) for step in steps]
            for y in reversed(started):
                y.square().sum().backward()
        else:
            for step in steps:
                y = forward(step)
                torch.testing.assert_close(y, outputs[rank, step])
                y.square().sum().backward()
        group.assert_idle()
        for own, all_ranks in zip(layers, reference, strict=True):
            for name, value in own.items():
                wanted = all_ranks[name].grad[rank * M : (rank + 1) * M]
                found = gradient(value, wanted)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def saving_products() -> tuple[Any, Any]:
    """Return the contexts of a recomputation that keeps the products of matrices."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


CASES: dict[str, tuple[Any, ...]] = {
    # form, as_map, recompute, options of the group, of each layer, interleaved microbatches
    "tensors": ("tensors", False, None, {}, [{}, {}], True),
    "a map": ("tensors", True, None, {}, [{}], False),
    "sequences of parameters": ("sequences", False, None, {}, [{}, {}], False),
    "flattened": ("flattened", True, None, {}, [{}], False),
    "distributed tensors": ("distributed", False, None, {}, [{}], False),
    "recomputed": ("tensors", False, "reentrant", {}, [{}, {}], False),
    "recomputed in part": ("tensors", False, "selective", {}, [{}, {}], False),
    "recomputed without reentrance": ("sequences", True, "other", {}, [{}, {}], True),
    "banks of their own": (
        "tensors",
        False,
        None,
        {"banks": 2},
        [{"bank": i, "reuse": True} for i in (0, 1)],
        True,
    ),
    "two live microbatches": ("tensors", False, None, {"banks": 2}, [{"live": 2}] * 2, True),
}


@pytest.mark.parametrize("engine", ["host", pytest.param("c10d", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_without_ranks(
    ranks: RankPool, case: str, engine: str
) -> None:
    ranks.run(G, train, engine, *CASES[case])


def test_live_microbatches_have_slots_of_their_own(
    new_groups: Callable[..., list[uec.Group]],
) -> None:
    """Two microbatches are between begin and their experts at one time."""
    expert = {"w": ((1,), torch.float32)}
    groups = new_groups(2, num_experts=4, slots_per_rank=1, expert=expert, banks=2)
    plans = [uec.Plan.from_slots(rows, num_experts=4) for rows in ([[2], [0]], [[3], [1]])]

    def held(rank: int, live: int) -> list[float]:
        calls = Replication(groups[rank], live=live)
        weights = {"w": torch.arange(2.0)[:, None] + 2 * rank}
        with torch.no_grad():
            runs = [calls.begin(weights, plan=plan) for plan in plans]
            runs[1].work.wait()
            return [float(run.before_experts(torch.zeros(1))[2]["w"]) for run in runs]

    assert loopback(2, lambda rank: held(rank, 2)) == [[2, 3], [0, 1]]
    assert loopback(2, lambda rank: held(rank, 1)) == [[3, 3], [1, 1]]  # another plan's


@pytest.fixture
def group() -> Iterator[uec.Group]:
    (made,) = uec.testing.new_loopback_groups(
        1, num_experts=2, slots_per_rank=1, expert={"w": ((3, 2), torch.float32)}, banks=2
    )
    with closing(made):
        yield made
        made.abort()


@pytest.mark.parametrize("options", [{"live": 3}, {"live": 2, "bank": 1}, {"bank": 2}, {"live": 0}])
def test_too_few_banks_are_said_at_setup(group: uec.Group, options: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="the group has 2 banks; expected one"):
        Replication(group, **options)  # type: ignore[arg-type]


def test_gradients_of_float16_weights_are_refused_before_the_first_pass() -> None:
    expert = {"w": ((2,), torch.float16)}
    (group,) = uec.testing.new_loopback_groups(
        1, num_experts=1, slots_per_rank=1, expert=expert, grads=torch.float32
    )
    weights = {"w": torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float16))}
    said = r"rank 0: main weights 'w' need gradients and are torch\.float16; expected .*bfloat16"
    with closing(group):
        with pytest.raises(errors.UnsupportedError, match=said):
            ReplicatedExperts(group, run_expert, weights)
        ids, replication = torch.zeros(3, 1, dtype=torch.int64), Replication(group)
        with torch.no_grad():
            replication.begin(weights, ids).work.wait()
        main_grads = {"w": torch.zeros(1, 2)}  # the experts accumulate them in fp32
        run = replication.begin(weights, ids, main_grads=main_grads)
        run.before_experts(run.before_dispatch(torch.zeros(3, 2, requires_grad=True)))
        del run
        epoch = group.health().epoch
        with pytest.raises(errors.UnsupportedError, match=said):
            replication.begin(weights, ids)
        assert group.health().epoch == epoch + 1  # which tells the peers


def test_weights_are_never_copied(group: uec.Group) -> None:
    forms: list[Any] = [torch.zeros(2, 3, 2), torch.zeros(6, 2), [torch.zeros(3, 2)] * 2]
    for given in forms:
        found = local_weights({"w": given}, group)["w"]
        first = given if isinstance(given, torch.Tensor) else given[0]
        assert found[0].data_ptr() == first.data_ptr()
        assert found[0].shape == (3, 2)


def test_few_tokens_get_an_empty_plan(new_groups: Callable[..., list[uec.Group]]) -> None:
    groups = new_groups(2, num_experts=4, slots_per_rank=1, expert={"w": ((3,), torch.float32)})
    ids = torch.tensor([[0]] * 6 + [[3]] * 2)
    for least, replicas in ((16, 1), (17, 0)):  # both ranks have 8

        def count(rank: int, least: int = least) -> int:
            calls = Replication(groups[rank], min_tokens=least)
            with torch.no_grad():
                run = calls.begin({"w": torch.zeros(2, 3)}, ids)
                run.before_experts(torch.zeros(1))
            assert run.topk_ids is not None
            assert (run.topk_ids >= 0).all()
            return run.plan.num_replicas

        assert loopback(2, count) == [replicas, replicas]


def train_the_router(rank: int, pg: Any, case: str, engine: str) -> list[Any]:
    """A backward pass that reaches the router, but not the experts."""
    with opened(pg, engine=engine) as group:
        calls, weights = Replication(group), own_weights("tensors", rank, 0)
        probs = torch.ones(4, requires_grad=True)
        x = torch.ones(4, requires_grad=case != "frozen")
        if case == "frozen":
            weights = {name: weight.detach() for name, weight in weights.items()}
        run = calls.begin(weights, torch.zeros((24, 1), dtype=torch.int64))
        rows, local, slots = run.before_experts(run.before_dispatch(x))
        y = run.after_experts(rows * (local["w1"].sum() + slots["w1"].sum()))
        loss = run.after_combine(y * probs).sum()
        before = group.health().epoch
        if case == "frozen":
            loss.backward()
        else:
            loss.backward(inputs=[probs], retain_graph=case == "retained")
        made = group.health().epoch - before
        if case == "retained":
            loss.backward()
            assert x.grad is not None
        group.assert_idle()
        return [made, probs.grad is not None]


@pytest.mark.parametrize("engine", ["host", "c10d"])
@pytest.mark.parametrize("case", ["frozen", "inputs", "retained"])
def test_nothing_is_transferred_for_a_backward_pass_without_experts(
    ranks: RankPool, case: str, engine: str
) -> None:
    """Nobody would wait for the transfer, and what it reads may be freed under it."""
    assert ranks.run(G, train_the_router, case, engine) == [[0, True]] * G


def test_an_empty_slot_has_no_gradient() -> None:
    slots = torch.randn((3, 2), requires_grad=True)
    plan = uec.Plan.from_slots([[2, -1, 3], [-1, -1, -1]], num_experts=4)
    expert = {"w": ((2,), torch.float32)}
    groups = new_loopback_groups(2, num_experts=4, slots_per_rank=3, expert=expert)
    parts = unbind_slots(slots, plan, groups[0])
    assert all(torch.equal(part, slots[i]) for i, part in enumerate(parts))
    assert [part.requires_grad for part in parts] == [True, False, True]
    assert not any(part.requires_grad for part in unbind_slots(slots, plan, groups[1]))


def diverge(rank: int, pg: Any, microbatch: int | None, prefetched: bool, engine: str) -> str:
    """The recomputed router sends all ids to another expert, with the same shapes."""
    with opened(pg, engine=engine) as group:
        calls, weights = Replication(group, layer=3), own_weights("tensors", rank, 0)
        hot = iter([0, 7])

        def layer(x: torch.Tensor) -> torch.Tensor:
            run = calls.begin(weights, torch.full((24, 1), next(hot)), microbatch=microbatch)
            x, local, slots = run.before_experts(run.before_dispatch(x))
            y = run.after_experts(x * (local["w1"].sum() + slots["w1"].sum()))
            # Behind a saved tensor, the layer is recomputed before its prefetch.
            return run.after_combine(y if prefetched else y * y)

        y = checkpoint(layer, torch.ones(4, requires_grad=True), use_reentrant=False)
        y = y if prefetched else y * y
        error = raised(lambda: y.sum().backward())
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("microbatch", "prefetched", "engine"),
    [(5, True, "host"), (None, True, "c10d"), (5, False, "c10d"), (None, False, "host")],
)
def test_a_recomputed_pass_that_routes_differently_is_an_error(
    ranks: RankPool, microbatch: int | None, prefetched: bool, engine: str
) -> None:
    found = ranks.run(G, diverge, microbatch, prefetched, engine)
    own = [text for text in found if text.startswith("InvalidArgumentError")]
    assert own
    for text in own:
        assert "the recomputed forward pass of layer 3, microbatch" in text
        assert "Save the router's ids" in text
    assert all(text in own or text.startswith("PeerRejectedError") for text in found)
