// All ranks' parts of a reduction together: every group of every replica is read by one rank and
// gets into its main gradient once, and every flag that is waited for has exactly one publisher.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "core/reduce_cases.hpp"
#include "support/check.hpp"

namespace {

using uec::Expected;
using uec::Mode;
using uec::Reduction;

using Slot = std::pair<int32_t, int32_t>;
using Consumed = std::tuple<int32_t, int32_t, int32_t>;         // owner, slot, reader
using Summed = std::tuple<int32_t, int32_t, int32_t, int32_t>;  // home, main, group, hub

struct Sums {
  std::map<Slot, std::vector<int32_t>> reads;     // per tile of a filled slot
  std::map<int32_t, std::vector<int32_t>> added;  // per tile of a replicated expert
  std::set<Consumed> published, expected;
  std::set<Summed> flagged, awaited;
  std::set<std::pair<int32_t, int32_t>> touches;  // (owner of memory, who reads it or flags there)
  std::set<int32_t> involved;
  int32_t cleared = 0;
};

// The replicas of an expert by ascending rank: the order in which they are added.
std::vector<Slot> replicas_of(const PlanCase& c, int32_t expert) {
  std::vector<Slot> slots;
  for (int32_t i = 0; i < static_cast<int32_t>(c.slot_expert.size()); ++i)
    if (c.slot_expert[i] == expert) slots.push_back({i / c.slots_per_rank, i % c.slots_per_rank});
  return slots;
}

std::vector<Slot> sources_of(const uec::Worklist& w, const Reduction& r) {
  CHECK(r.first >= 0 && r.first + r.count <= w.num_destinations);
  std::vector<Slot> slots;
  for (int32_t i = r.first; i < r.first + r.count; ++i)
    slots.push_back({w.destinations[i].rank, w.destinations[i].slot});
  return slots;
}

void add_clearing(const PlanCase& c, int32_t rank, const uec::Worklist& w, const Reduction& r,
                  int64_t tiles, Sums& sums) {
  CHECK_EQ(c.slot_expert[rank * c.slots_per_rank + r.idx], r.expert);
  CHECK_EQ(r.tile, 0);
  CHECK_EQ(r.end_tile, tiles);
  ++sums.cleared;
  // Waits for all readers of the slot, and for no other rank.
  for (int32_t i = 0; i < w.num_expected; ++i)
    CHECK_EQ(w.expected[i].idx == r.idx, i >= r.first && i < r.first + r.count);
}

void add_reading(const PlanCase& c, int32_t rank, const uec::Worklist& w, const Reduction& r,
                 Sums& sums) {
  const int32_t home = c.home[r.expert];
  const std::vector<Slot> replicas = replicas_of(c, r.expert), sources = sources_of(w, r);
  if (r.kind == Reduction::kSum) {
    CHECK_EQ(r.home, home);
    CHECK_EQ(r.local_idx, c.local_idx()[r.expert]);
    CHECK_EQ(c.slot_expert[rank * c.slots_per_rank + r.idx], r.expert);
    CHECK(sources == replicas);
    sums.touches.insert({home, rank});
    for (int32_t g = r.begin; g < r.end; ++g)
      CHECK(sums.flagged.insert({home, r.local_idx, g, rank}).second);
  } else {
    CHECK_EQ(rank, home);
    CHECK_EQ(r.idx, c.local_idx()[r.expert]);
    CHECK_EQ(r.local_idx, r.idx);
    for (int32_t i = r.tile; i < r.end_tile; ++i) ++sums.added[r.expert][i];
    if (r.of_hub) {
      CHECK_EQ(r.count, 1);
      CHECK(std::find(replicas.begin(), replicas.end(), sources[0]) != replicas.end());
      for (int32_t g = r.begin; g < r.end; ++g)
        CHECK(sums.awaited.insert({rank, r.local_idx, g, sources[0].first}).second);
    } else {
      CHECK(sources == replicas);
    }
  }
  for (const auto& [owner, slot] : sources) {
    for (int32_t i = r.tile; i < r.end_tile && !r.of_hub; ++i) ++sums.reads[{owner, slot}][i];
    if (owner == rank) continue;
    sums.touches.insert({owner, rank});
    CHECK(sums.published.insert({owner, slot, rank}).second);
  }
}

void add_rank(const ReduceCase& c, int32_t rank, const Given& given, Sums& sums) {
  const uec::Worklist& w = given.call.work;
  CHECK_EQ(w.num_tasks, 0);
  CHECK_EQ(w.num_pieces, 0);
  for (int32_t i = 0; i < w.num_reductions; ++i) {
    const Reduction& r = w.reductions[i];
    CHECK(r.group_tiles >= given.call.tiles.group_tiles);
    CHECK(0 <= r.begin && r.begin < r.end && r.end <= given.call.tiles.num_groups());
    CHECK_EQ(r.end - r.begin, uec::ceil_div(r.end_tile - r.tile, r.group_tiles));
    if (r.kind == Reduction::kZero)
      add_clearing(c.plan, rank, w, r, given.call.tiles.num_tiles(), sums);
    else
      add_reading(c.plan, rank, w, r, sums);
  }
  for (int32_t i = 0; i < w.num_expected; ++i) {
    const Expected& e = w.expected[i];
    CHECK(e.kind == Expected::kConsumed);
    CHECK_EQ(c.plan.slot_expert[rank * c.plan.slots_per_rank + e.idx], e.expert);
    CHECK(sums.expected.insert({rank, e.idx, e.peer}).second);
  }
  for (int32_t r = 0; r < c.plan.num_ranks; ++r) CHECK_EQ(w.involved[r], sums.involved.contains(r));
}

void check_case(const ReduceCase& c) {
  const PlanCase& plan = c.plan;
  Sums sums;
  Given first(plan.num_ranks > 0 ? c.capacity(0) : uec::Capacity{});
  prepare_reduction(uec::SingleThread{}, c, 0, first);
  for (int32_t e = 0; e < plan.num_experts; ++e) {
    const std::vector<Slot> replicas = replicas_of(plan, e);
    if (replicas.empty()) continue;
    const int64_t tiles = first.call.tiles.num_tiles();
    sums.added[e].resize(tiles);
    sums.involved.insert(plan.home[e]);
    for (const Slot& slot : replicas) {
      sums.reads[slot].resize(tiles);
      sums.involved.insert(slot.first);
    }
  }
  std::vector<std::unique_ptr<Given>> ranks;
  for (int32_t r = 0; r < plan.num_ranks; ++r) {
    // Bytes around its arrays are seen to be untouched.
    ranks.push_back(std::make_unique<Given>(c.capacity(r)));
    Given& given = *ranks.back();
    prepare_reduction(uec::SingleThread{}, c, r, given);
    CHECK(given.call.work.num_reductions <= c.capacity(r).reductions());
    CHECK(given.call.work.num_destinations <= 2 * c.capacity(r).replicas());
    CHECK(given.call.work.num_expected <= 2 * c.capacity(r).replicas());
    add_rank(c, r, given, sums);
    given.call.reset_counters(uec::SingleThread{});
    for (int32_t i = 0; i < given.call.work.num_reductions; ++i) CHECK_EQ(given.call.arrived[i], 0);
  }
  CHECK_EQ(sums.reads.size(), plan.num_replicas());  // nothing but filled slots
  CHECK_EQ(sums.cleared, c.zero ? plan.num_replicas() : 0);
  for (const auto& [slot, counts] : sums.reads)
    for (const int32_t count : counts) CHECK_EQ(count, 1);
  for (const auto& [expert, counts] : sums.added)
    for (const int32_t count : counts) CHECK_EQ(count, 1);
  CHECK(sums.flagged == sums.awaited);
  CHECK(sums.published == sums.expected);
  for (int32_t r = 0; r < plan.num_ranks; ++r)
    for (int32_t peer = 0; peer < plan.num_ranks; ++peer) {
      CHECK_EQ(ranks[r]->call.work.opens[peer], sums.touches.contains({r, peer}));
      CHECK_EQ(ranks[r]->call.work.needs[peer], sums.touches.contains({peer, r}));
    }
}

// Two replicas of two groups, hubs of one each, word for word.
void check_known() {
  PlanCase plan = make_group(3, 3, 1);
  CHECK(plan.place(0, 1) && plan.place(0, 2));
  ReduceCase c(plan);
  c.add_segment(64 << 10, uec::GradType::kFloat32, uec::GradType::kFloat32);
  c.mode = static_cast<int32_t>(Mode::kPull);
  Given home(c.capacity(0)), hub(c.capacity(1));
  prepare_reduction(uec::SingleThread{}, c, 0, home);
  const uec::Worklist& h = home.call.work;
  CHECK_EQ(h.num_reductions, 2);
  for (int32_t i = 0; i < 2; ++i) {
    CHECK(h.reductions[i].kind == Reduction::kAdd && h.reductions[i].of_hub);
    CHECK_EQ(h.reductions[i].begin, i);
    CHECK_EQ(h.reductions[i].end, i + 1);
    CHECK_EQ(h.destinations[h.reductions[i].first].rank, i + 1);
  }
  CHECK_EQ(h.num_expected, 0);
  prepare_reduction(uec::SingleThread{}, c, 1, hub);
  const uec::Worklist& w = hub.call.work;
  CHECK_EQ(w.num_reductions, 2);
  CHECK(w.reductions[0].kind == Reduction::kSum && w.reductions[1].kind == Reduction::kZero);
  CHECK_EQ(w.reductions[0].count, 2);
  CHECK_EQ(w.reductions[1].end, 2);
  CHECK_EQ(w.num_expected, 2);
  CHECK(w.expected[0].peer == 0 && w.expected[1].peer == 2);
}

}  // namespace

int main() {
  check_known();
  Random random(15);
  for (int repeat = 0; repeat < scaled(1200); ++repeat) {
    ReduceCase c(draw_case(random, repeat % 10 == 0 ? 36 : 10), random);
    if (repeat % 4 == 0) c.tile_bytes = 128 << 10;  // fewer groups than hubs
    check_case(c);
  }
}
