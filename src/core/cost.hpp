// mode="auto": which transfer mode a schedule should take, by an integer cost model.
#pragma once

#include "core/schedule.hpp"

namespace uec {

// Rank 0's constants, the same on every rank, so that all choose alike. Times in picoseconds.
struct CostModel {
  int64_t store_per_kib = 0;  // storing to a peer
  int64_t load_per_kib = 0;   // reading a source that is not in a cache
  int64_t group = 0;          // flagging one group, waking its waiter
  int64_t hop = 0;            // from a publish to the peer's next store
  // What all ranks move together over what one moves alone, in percent: 100 where they share one
  // core, less than cores * 100 where memory is the limit, num_ranks * 100 on a rack.
  int64_t parallel_percent = 100;
};

// Modelled time of one mode, in picoseconds. A rank is busy with what it sends and reads, or with
// what it receives; where fewer ranks can run than there are, their work adds up.
// Ranges count unrounded, so a relay of less than a group per hub looks better than it is. Nothing
// overflows while all stores, one after the other, would take less than 140 s.
UEC_HD inline int64_t modelled_time(const Topology& t, const TileMap& tiles, const PlanShape& shape,
                                    const Schedule& s, const CostModel& cost) {
  if (s.num_experts == 0) return 0;
  const int64_t kib = ceil_div(tiles.expert_bytes(), 1024);
  const int64_t store = kib * cost.store_per_kib, load = kib * cost.load_per_kib;
  int64_t busiest = 0, stores = 0, loads = s.num_experts * load, flags = 0;
  for (int32_t r = 0; r < t.num_ranks; ++r) {
    busiest = max64(busiest, s.egress[r]);
    stores += s.egress[r];
  }
  const GroupCounts num_groups(tiles);
  for (int32_t x = 0; s.mode == Mode::kPush && x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x);
    const int64_t groups = max64(num_groups.of(n), 1);
    const int64_t forwarded = s.boundaries(x)[n + 1] - s.boundaries(x)[1];
    flags += forwarded * cost.group;
    loads += load * forwarded / groups;  // a hub in push reads again what the home has written
  }
  const int64_t alone = max64(busiest * (store + load / max64(shape.max_fanout, 1)) / kEgressUnit,
                              shape.max_imports * store);
  const int64_t percent = max64(min64(cost.parallel_percent, int64_t{100} * t.num_ranks), 1);
  const int64_t together = (stores / kEgressUnit * store + loads + flags) / percent * 100;
  const int64_t hops = s.mode == Mode::kDirect ? 1 : 2;
  return max64(alone, together) + hops * cost.hop;
}

// Builds the schedule in the mode asked for, or (`mode` < 0) in the cheapest allowed one.
UEC_HD inline void make_schedule(const Topology& t, const TileMap& tiles,
                                 const int32_t* slot_expert, int32_t mode, bool may_pull,
                                 const CostModel& cost, const ScheduleScratch& scratch,
                                 PlanShape& shape, Schedule& s) {
  shape = collect_replicas(t, slot_expert, scratch, s);
  if (mode >= 0) return assign_hubs(t, tiles, shape, static_cast<Mode>(mode), scratch, s);
  // With one replica each, and nothing to relay, all modes send the same bytes the same way.
  assign_hubs(t, tiles, shape, Mode::kDirect, scratch, s);
  if (shape.max_fanout <= 1) return;
  const int64_t direct = modelled_time(t, tiles, shape, s, cost);
  const Mode relay = may_pull ? Mode::kPull : Mode::kPush;
  assign_hubs(t, tiles, shape, relay, scratch, s);
  if (modelled_time(t, tiles, shape, s, cost) >= direct)
    assign_hubs(t, tiles, shape, Mode::kDirect, scratch, s);
}

}  // namespace uec
