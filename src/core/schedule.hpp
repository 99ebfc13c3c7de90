// Plan -> schedule: for each replicated expert its hubs and the range of flag groups each hands
// out.
//
// A hub (the home or a replica) gives its range to every replica of the expert. Splitting an
// expert's groups over hubs by water-filling on the ranks' egress brings the busiest link close to
// the bound of any schedule: each replicated expert leaves its home once and each slot is filled
// once. All integers, so that every rank computes the same bytes.
#pragma once

#include "core/common.hpp"
#include "core/tiles.hpp"

namespace uec {

enum class Mode : int32_t { kPush = 0, kPull = 1, kDirect = 2 };
inline constexpr int32_t kNumModes = 3;

// One expert's bytes, in the fixed point that egress is counted in.
inline constexpr int64_t kEgressUnit = 1 << 16;

// Capacities: R = num_ranks * slots_per_rank replicas, X = min(num_experts, R) replicated experts.
// Replicas of an expert stand in ascending rank order; its hubs are the home and then the replicas,
// and hub i owns groups [boundary[i], boundary[i + 1]) counted from boundary_first(x).
struct Schedule {
  Mode mode = Mode::kDirect;
  int32_t num_experts = 0;          // X: replicated experts, by ascending id
  int32_t* expert = nullptr;        // [X]
  int32_t* first = nullptr;         // [X + 1] into replica_rank and replica_slot
  int32_t* replica_rank = nullptr;  // [R]
  int32_t* replica_slot = nullptr;  // [R]
  int32_t* boundary = nullptr;      // [R + 2X]
  int64_t* egress = nullptr;        // [G] sent, in kEgressUnit per expert, before rounding

  UEC_HD int32_t num_replicas(int32_t x) const { return first[x + 1] - first[x]; }
  UEC_HD int32_t* boundaries(int32_t x) { return boundary + first[x] + 2 * x; }
  UEC_HD const int32_t* boundaries(int32_t x) const { return boundary + first[x] + 2 * x; }
};

// What the shape of a plan costs, before any mode is chosen. Counts are in experts.
struct PlanShape {
  int32_t num_replicas = 0;
  int32_t max_exports = 0;  // max over ranks of distinct replicated experts at home there
  int32_t max_imports = 0;  // max over ranks of filled slots
  int32_t max_fanout = 0;   // max over experts of replicas
  bool chained = false;     // some rank both exports and imports
};

struct ScheduleScratch {
  int32_t* count = nullptr;    // [E + 1]
  int32_t* exports = nullptr;  // [G]
  int32_t* order = nullptr;    // [X] experts by descending replicas, then id
  int64_t* extra = nullptr;    // [R + X] egress a hub adds to its rank, per expert and hub
};

// Collects the replicas of each expert. The plan has been validated. Its values are counted, not
// branched on: no branch predictor knows the next plan.
UEC_HD inline PlanShape collect_replicas(const Topology& t, const int32_t* slot_expert,
                                         const ScheduleScratch& scratch, Schedule& s) {
  PlanShape shape;
  const int32_t num_ranks = t.num_ranks, slots = t.slots_per_rank;
  int32_t* const count = scratch.count + 1;  // of empty slots too, at -1
  int32_t* const filled = s.boundary;        // [R] slots; free until hubs are assigned
  for (int32_t e = -1; e < t.num_experts; ++e) count[e] = 0;
  for (int32_t r = 0, at = 0; r < num_ranks; ++r) {
    const int32_t before = shape.num_replicas;
    for (int32_t i = 0; i < slots; ++i, ++at) {
      filled[shape.num_replicas] = at;
      shape.num_replicas += slot_expert[at] >= 0;
      ++count[slot_expert[at]];
    }
    shape.max_imports = max32(shape.max_imports, shape.num_replicas - before);
  }
  // Counting sort by expert: ranks are visited in order, so replicas come out in rank order.
  s.num_experts = 0;
  int32_t placed = 0;
  for (int32_t e = 0; placed < shape.num_replicas; ++e) {
    const int32_t n = count[e];
    s.expert[s.num_experts] = e;  // stays if there are any
    s.first[s.num_experts] = placed;
    s.num_experts += n > 0;
    count[e] = placed;  // from here on: where the next replica of e goes
    placed += n;
    shape.max_fanout = max32(shape.max_fanout, n);
  }
  s.first[s.num_experts] = placed;
  for (int32_t r = 0; r < num_ranks; ++r) scratch.exports[r] = 0;
  for (int32_t x = 0; x < s.num_experts; ++x)
    shape.max_exports = max32(shape.max_exports, ++scratch.exports[t.home[s.expert[x]]]);
  for (int32_t i = 0; i < shape.num_replicas; ++i) {
    const int32_t r = filled[i] / slots;
    const int32_t to = count[slot_expert[filled[i]]]++;
    s.replica_rank[to] = r;
    s.replica_slot[to] = filled[i] - r * slots;
    shape.chained |= scratch.exports[r] > 0;
  }
  return shape;
}

namespace detail {

// Hub i of expert x: the home, then the replicas.
UEC_HD inline int32_t hub_rank(const Topology& t, const Schedule& s, int32_t x, int32_t hub) {
  return hub == 0 ? t.home[s.expert[x]] : s.replica_rank[s.first[x] + hub - 1];
}

// Water-filling: the largest level with sum(max(level - egress, 0)) <= total. What is left goes to
// the first hubs at the level, one unit each.
//
// Newton's steps from above: if only hubs below a level that is too high were filled, total would
// take them to a lower one, which is no lower than the one sought. Few steps, and no sorting.
UEC_HD inline void fill_expert(const Topology& t, Schedule& s, int32_t x, int64_t* extra) {
  const int32_t n = s.num_replicas(x);
  const int64_t total = (n - 1) * kEgressUnit;
  int64_t* const egress = extra;  // of the hubs without this expert's extra, until that is known
  int64_t below = 0, num_below = n + 1;
  for (int32_t hub = 0; hub <= n; ++hub) {
    const int64_t others = s.egress[hub_rank(t, s, x, hub)] - extra[hub];
    egress[hub] = others;
    below += others;
  }
  int64_t level, filled;
  for (;;) {
    level = (total + below) / num_below;
    filled = below = num_below = 0;
    for (int32_t hub = 0; hub <= n; ++hub) {
      const int64_t e = egress[hub];
      filled += max64(level - e, 0);
      below += e < level ? e : 0;
      num_below += e < level;
    }
    if (filled <= total) break;
  }
  int64_t left = total - filled;
  for (int32_t hub = 0; hub <= n; ++hub) {
    const int64_t others = egress[hub];
    const int64_t unit = left > 0 && others <= level;
    left -= unit;
    extra[hub] = max64(level - others, 0) + unit;
    s.egress[hub_rank(t, s, x, hub)] = others + extra[hub];
  }
}

}  // namespace detail

// Fills `boundary` and `egress` of a schedule whose replicas have been collected.
UEC_HD inline void assign_hubs(const Topology& t, const TileMap& tiles, const PlanShape& shape,
                               Mode mode, const ScheduleScratch& scratch, Schedule& s) {
  s.mode = mode;
  for (int32_t r = 0; r < t.num_ranks; ++r) s.egress[r] = 0;
  const GroupCounts num_groups(tiles);
  if (mode == Mode::kDirect) {
    for (int32_t x = 0; x < s.num_experts; ++x) {
      const int32_t n = s.num_replicas(x);
      int32_t* bounds = s.boundaries(x);
      bounds[0] = 0;
      for (int32_t hub = 1; hub <= n + 1; ++hub) bounds[hub] = num_groups.of(n);
      s.egress[t.home[s.expert[x]]] += n * kEgressUnit;
    }
    return;
  }

  // Descending fan-out, then id: widely replicated experts have the most freedom and the most to
  // place. A counting pass over fan-outs would need more scratch; few experts have n > 1.
  int32_t num_shared = 0;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    s.egress[t.home[s.expert[x]]] += kEgressUnit;
    const int32_t n = s.num_replicas(x);
    int64_t* extra = scratch.extra + s.first[x] + x;
    for (int32_t hub = 0; hub <= n; ++hub) extra[hub] = 0;
    if (n == 1) continue;
    int32_t at = num_shared++;
    for (; at > 0 && s.num_replicas(scratch.order[at - 1]) < n; --at)
      scratch.order[at] = scratch.order[at - 1];
    scratch.order[at] = x;
  }
  const int32_t passes = shape.chained ? 4 : 2;
  for (int32_t pass = 0; pass < passes; ++pass)
    for (int32_t i = 0; i < num_shared; ++i) {
      const int32_t x = scratch.order[i];
      detail::fill_expert(t, s, x, scratch.extra + s.first[x] + x);
    }

  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x);
    const int32_t groups = num_groups.of(n);
    const int64_t total = (n - 1) * kEgressUnit;
    const int64_t* extra = scratch.extra + s.first[x] + x;
    int32_t* bounds = s.boundaries(x);
    bounds[0] = 0;
    int64_t sum = 0;
    for (int32_t hub = 0; hub <= n; ++hub) {
      sum += extra[hub];
      // Rounded to the nearest group; n == 1 has no extra and leaves everything to the home.
      bounds[hub + 1] =
          n == 1 ? groups : static_cast<int32_t>((2 * sum * groups + total) / (2 * total));
    }
  }
}

}  // namespace uec
