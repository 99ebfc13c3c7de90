// mode="auto": which transfer mode a schedule should take, by an integer cost model.
#pragma once

#include "core/schedule/hubs.hpp"
#include "core/schedule/schedule.hpp"
#include "core/schedule/tiles.hpp"

namespace uec {

// Rank 0's constants, the same on every rank, so that all choose alike. Times in picoseconds.
struct CostModel {
  int64_t store_per_kib = 0;  // storing to a peer
  int64_t load_per_kib = 0;   // reading a source that is not in a cache
  int64_t group = 0;          // flagging one group, waking its waiter
  int64_t hop = 0;            // from a publish to the peer's next store
  // Throughput of all ranks together relative to one rank alone, in percent: 100 where they share
  // one core, less than cores * 100 where memory is the limit, num_ranks * 100 on a rack.
  int64_t parallel_percent = 100;
};

// Modelled time of one mode, in picoseconds. A rank is busy with what it sends and reads, or with
// what it receives; where not all ranks can run at once, their work adds up. Ranges are not rounded
// to groups, so a relay of less than a group per hub looks better than it is. Nothing overflows as
// long as all stores, done in sequence, would take less than 140 s.
//
// Run by a team as the functions of schedule.hpp are.
template <class Team>
UEC_HD_NOINLINE int64_t modelled_time(Team team, const Topology& t, const TileMap& tiles,
                                      int32_t num_groups, const PlanShape& shape, const Schedule& s,
                                      const CostModel& cost) {
  if (s.num_experts == 0) return 0;
  const Mode mode = s.mode;
  const int64_t kib = ceil_div(tiles.expert_bytes(), 1024);
  const int64_t store = kib * cost.store_per_kib, load = kib * cost.load_per_kib;
  uint64_t most = 0;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    most = s.egress[r] > static_cast<int64_t>(most) ? static_cast<uint64_t>(s.egress[r]) : most;
  const auto busiest = static_cast<int64_t>(highest(team, most));
  int64_t loads = s.num_experts * load, flags = 0;
  if (mode == Mode::kPush) {
    uint64_t forwarded = 0, read = 0;
    UEC_ROLLED
    for (int32_t x = team.index(); x < s.num_experts; x += team.size()) {
      const int32_t n = s.num_replicas(x);
      const int64_t by_hubs = s.boundaries(x)[n + 1] - s.boundaries(x)[1];
      if (by_hubs == 0) continue;
      forwarded += static_cast<uint64_t>(by_hubs);
      // In push mode a hub reads back what the home has written.
      read += static_cast<uint64_t>(load * by_hubs / num_groups);
    }
    flags = static_cast<int64_t>(team.sum(forwarded)) * cost.group;
    loads += static_cast<int64_t>(team.sum(read));
  }
  const int64_t alone = max64(busiest * (store + load / max64(shape.max_fanout, 1)) / kEgressUnit,
                              shape.max_imports * store);
  const int64_t percent = max64(min64(cost.parallel_percent, int64_t{100} * t.num_ranks), 1);
  // Every replica is stored once.
  const int64_t together = (shape.num_replicas * store + loads + flags) / percent * 100;
  const int64_t hops = mode == Mode::kDirect ? 1 : 2;
  return max64(alone, together) + hops * cost.hop;
}

// Assigns hubs to collected replicas in the mode asked for, or (`mode` < 0) in the cheapest allowed
// one. kDirect is none where an expert would cross between domains once for each of several
// replicas.
template <class Team>
UEC_HD void choose_hubs(Team team, const Topology& t, const TileMap& tiles, const PlanShape& own,
                        int32_t mode, bool may_pull, const CostModel& cost,
                        const ScheduleScratch& scratch, Schedule& s) {
  const int32_t num_groups = tiles.num_groups();
  const Mode relay = may_pull ? Mode::kPull : Mode::kPush;
  if (mode < 0 && own.relays) mode = static_cast<int32_t>(relay);
  const bool has_choice = mode < 0 && own.max_fanout > 1;
  // With one replica each, and nothing to relay, all modes send the same bytes the same way.
  Mode next = mode >= 0 ? static_cast<Mode>(mode) : Mode::kDirect;
  int64_t direct = 0;
  UEC_ROLLED
  for (int32_t round = 0;; ++round) {  // direct, relay, and direct again if that was cheaper
    assign_hubs(team, t, num_groups, own, next, scratch, s);
    if (!has_choice || round == 2) return;
    const int64_t time = modelled_time(team, t, tiles, num_groups, own, s, cost);
    if (round == 1 && time < direct) return;
    direct = time;
    next = round == 0 ? relay : Mode::kDirect;
  }
}

// Makes the whole schedule of a transfer. The leader writes the shape and the schedule's scalars.
// `resident`: as in SlotsToFill.
template <class Team>
UEC_HD void make_schedule(Team team, const Topology& t, const TileMap& tiles,
                          const int32_t* slot_expert, const int32_t* resident, int32_t mode,
                          bool may_pull, const CostModel& cost, const ScheduleScratch& scratch,
                          PlanShape* shape, Schedule& s) {
  const PlanShape own = collect_entries(team, t, slot_expert, SlotsToFill{resident}, scratch, s);
  if (team.leader()) *shape = own;
  choose_hubs(team, t, tiles, own, mode, may_pull, cost, scratch, s);
}

}  // namespace uec
