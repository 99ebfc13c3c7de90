// Plan -> schedule -> worklist: what one rank needs for a call, in arrays that it is given.
#pragma once

#include <cstddef>

#include "core/base/digest.hpp"
#include "core/schedule/cost.hpp"
#include "core/schedule/reduce_schedule.hpp"
#include "core/schedule/reduce_worklist.hpp"
#include "core/schedule/schedule.hpp"
#include "core/schedule/worklist.hpp"
#include "core/transfer/call_arrays.hpp"

namespace uec {

enum class Operation : uint64_t { kReplicate = 1, kGather = 2, kReduce = 3 };

// The schedule and what computing it needs.
struct ScheduleArrays {
  Schedule schedule;
  ScheduleScratch scratch;

  // Works as CallArrays::cut().
  UEC_HD static int64_t cut(std::byte* base, const Capacity& c, ScheduleArrays* arrays) {
    ScratchCutter cutter(base);
    const int64_t replicas = c.replicas(), experts = c.entries();
    Schedule& s = arrays->schedule;
    ScheduleScratch& scratch = arrays->scratch;
    s.egress = cutter.take<int64_t>(c.num_ranks);
    scratch.extra = cutter.take<int64_t>(replicas + experts);
    s.expert = cutter.take<int32_t>(experts);
    s.first = cutter.take<int32_t>(experts + 1);
    s.replica_rank = cutter.take<int32_t>(replicas);
    s.replica_slot = cutter.take<int32_t>(replicas);
    s.boundary = cutter.take<int32_t>(replicas + 2 * experts);
    scratch.count = cutter.take<int32_t>(max64(c.num_experts, experts) + 1);
    scratch.exports = cutter.take<int32_t>(c.num_ranks);
    scratch.order = cutter.take<int32_t>(experts);
    s.source = cutter.take<Sender>(experts);
    return round_up(cutter.used_bytes(), 8);
  }
};

// What a rank knows of its group. Arrays are borrowed.
struct GroupTables {
  Topology topology;
  int32_t rank = 0;
  const int64_t* segment_bytes = nullptr;  // [segments] of one expert
  const int32_t* local_idx = nullptr;      // [E] index among the home's local experts
  int64_t tile_bytes = 0;
  CostModel cost;
  Gradients grads;
};

// What a call knows of the bank that it fills.
struct Bank {
  int32_t index = -1;                 // -1: none, and all slots count as empty
  uint64_t version = 0;               // of the weights that its residents are of
  const int32_t* resident = nullptr;  // [G][S] as in SlotsToFill
};

struct ReplicateArgs {
  const int32_t* slot_expert = nullptr;  // [G][S], validated
  uint64_t plan_digest = 0;              // of what else the plan says (quotas)
  uint64_t tag = 0;                      // of the plan's handle: layer and microbatch; 0: none
  const uint64_t* main_ptrs = nullptr;   // [segments][M] addresses
  const int32_t* segments = nullptr;     // which segments, ascending
  int32_t num_segments = 0;
  int32_t mode = -1;    // a Mode, or -1: by cost
  int32_t region = -1;  // pull: which region the main weights lie in
  Bank bank{};

  UEC_HD SlotsToFill slots() const { return {bank.resident}; }
};

// One thread fills the tiles of a call, ahead of the rest.
UEC_HD inline void fill_tiles(const GroupTables& group, const int32_t* segments,
                              int32_t num_segments, const int64_t* segment_bytes,
                              const CallArrays& arrays, TileMap* tiles) {
  tiles->num_segments = num_segments;
  tiles->tile_bytes = group.tile_bytes;
  tiles->group_tiles = TileMap::tiles_per_group(group.tile_bytes);
  int64_t first_tile = arrays.first_tile[0] = 0;
  for (int32_t i = 0; i < num_segments; ++i) {
    arrays.segment[i] = segments == nullptr ? i : segments[i];
    arrays.bytes[i] = segment_bytes[arrays.segment[i]];
    first_tile += divide(arrays.bytes[i] + group.tile_bytes - 1, group.tile_bytes);
    arrays.first_tile[i + 1] = first_tile;
  }
}
UEC_HD inline void fill_segments(const GroupTables& group, const ReplicateArgs& args,
                                 const CallArrays& arrays, Call* call) {
  fill_tiles(group, args.segments, args.num_segments, group.segment_bytes, arrays, &call->tiles);
}

// What follows is run by a team as the functions of schedule.hpp are: `work` and `call` are shared
// by the members, and the leader writes their scalars.

// Completes the schedule, once the plan's replicas have been collected.
template <class Team>
UEC_HD void choose_mode(Team team, const GroupTables& group, const ReplicateArgs& args,
                        const PlanShape& shape, const TileMap& tiles, ScheduleArrays& work) {
  choose_hubs(team, group.topology, tiles, shape, args.mode, args.region >= 0, group.cost,
              work.scratch, work.schedule);
}
// Fills the rank's worklist from the schedule.
template <class Team>
UEC_HD void fill_worklist(Team team, const GroupTables& group, const ReplicateArgs&,
                          const ScheduleArrays& work, Call* call) {
  build_worklist(team, group.topology, work.schedule, group.local_idx, group.rank, call->work);
}

// What this call adds to the digest that ranks must agree on, up to its mode.
template <class Team>
UEC_HD uint64_t digest_call(Team team, const Topology& t, const ReplicateArgs& args,
                            uint64_t plan_digest) {
  uint64_t digest = mix(static_cast<uint64_t>(Operation::kReplicate), plan_digest);
  digest = mix(digest, args.tag);  // plans that are equal may be of different layers
  const int64_t slots = int64_t{t.num_ranks} * t.slots_per_rank;
  digest = digest_ints(team, digest, args.slot_expert, slots);
  digest = digest_ints(team, digest, args.segments, args.num_segments);
  if (args.bank.index < 0) return digest;
  // Rule: ranks that differ on what slots hold, or of which version, move nothing. One would send
  // from a slot that another is to fill, or leave weights in place that have changed.
  digest = mix(mix(digest, static_cast<uint64_t>(args.bank.index)), args.bank.version);
  return digest_ints(team, digest, args.bank.resident, slots);
}
UEC_HD inline uint64_t with_mode(uint64_t digest, const ReplicateArgs& args, Mode mode) {
  digest = mix(digest, static_cast<uint64_t>(mode));
  return mix(digest, static_cast<uint64_t>(mode == Mode::kPull ? args.region : -1));
}

struct ReduceArgs {
  const int32_t* slot_expert = nullptr;  // [G][S], validated
  const int32_t* slot_quota = nullptr;   // [G][S] slots without tokens have no gradient; null: all
                                         // have
  uint64_t plan_digest = 0;              // of what else the plan says (quotas)
  uint64_t tag = 0;                      // of the plan's handle: layer and microbatch; 0: none
  const uint64_t* main_ptrs = nullptr;   // [segments][M] addresses of main gradients
  const GradType* main_type = nullptr;   // [segments] of this rank's main gradients
  int32_t mode = -1;                     // kPull, kDirect, or -1: by cost
  bool zero = true;                      // slot gradients are cleared
  int32_t bank = -1;                     // the plan's; -1: none

  UEC_HD SlotsWithTokens slots() const { return {slot_quota}; }
};

// Fills the tiles of a reduction. Each rank's main gradients are its own business.
UEC_HD inline void fill_segments(const GroupTables& group, const ReduceArgs& args,
                                 const CallArrays& arrays, Call* call) {
  const Gradients& grads = group.grads;
  call->grads = grads;
  fill_tiles(group, nullptr, grads.num_segments, grads.bytes, arrays, &call->tiles);
  for (int32_t i = 0; i < grads.num_segments; ++i) arrays.main_type[i] = args.main_type[i];
}
template <class Team>
UEC_HD void choose_mode(Team team, const GroupTables& group, const ReduceArgs& args,
                        const PlanShape& shape, const TileMap& tiles, ScheduleArrays& work) {
  choose_sums(team, group.topology, tiles, shape, args.mode, group.cost, work.schedule);
}
template <class Team>
UEC_HD void fill_worklist(Team team, const GroupTables& group, const ReduceArgs& args,
                          const ScheduleArrays& work, Call* call) {
  build_reductions(team, group.topology, call->tiles, work.schedule, group.local_idx, group.rank,
                   args.zero, call->work);
}

template <class Team>
UEC_HD uint64_t digest_call(Team team, const Topology& t, const ReduceArgs& args,
                            uint64_t plan_digest) {
  uint64_t digest = mix(static_cast<uint64_t>(Operation::kReduce), plan_digest);
  if (args.bank >= 0) digest = mix(digest, static_cast<uint64_t>(args.bank));
  return digest_ints(team, mix(digest, args.tag), args.slot_expert,
                     int64_t{t.num_ranks} * t.slots_per_rank);
}
UEC_HD inline uint64_t with_mode(uint64_t digest, const ReduceArgs& args, Mode mode) {
  return mix(digest, static_cast<uint64_t>(mode) << 1 | args.zero);
}

// Makes a call's tiles and schedule, and returns its digest: the part that all engines have in
// common, and that is the same on every rank.
template <class Team, class Args>
UEC_HD uint64_t schedule_call(Team team, const GroupTables& group, const Args& args,
                              const CallArrays& arrays, ScheduleArrays& work, PlanShape* shape,
                              Call* call) {
  if (team.leader())
    fill_segments(group, args, arrays, call);  // members meet before they look at it
  const PlanShape own = collect_entries(team, group.topology, args.slot_expert, args.slots(),
                                        work.scratch, work.schedule);
  if (team.leader()) *shape = own;
  choose_mode(team, group, args, own, call->tiles, work);
  return with_mode(digest_call(team, group.topology, args, args.plan_digest), args,
                   work.schedule.mode);
}

// Fills all of a rank's call except the addresses of main weights or gradients, and returns its
// digest.
template <class Team, class Args>
UEC_HD uint64_t fill_call(Team team, const GroupTables& group, const Args& args,
                          const CallArrays& arrays, ScheduleArrays& work, PlanShape* shape,
                          Call* call) {
  const uint64_t digest = schedule_call(team, group, args, arrays, work, shape, call);
  fill_worklist(team, group, args, work, call);
  return digest;
}

}  // namespace uec
