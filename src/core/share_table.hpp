// The shares of one source rank as a table that any token can be looked up in, made for one expert
// at a time by a team: teams need to know nothing of each other. compute_shares() makes the same
// for all experts in turn.
#pragma once

#include <cstdint>

#include "core/common.hpp"
#include "core/mains.hpp"
#include "core/reroute.hpp"
#include "core/shares.hpp"
#include "core/team.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// The physical ids of a group's instances.
struct InstanceIds {
  int32_t per_rank = 0;              // P
  const int32_t* main_id = nullptr;  // [E] of the main instance
  const int32_t* slot_id = nullptr;  // [G] of a rank's first slot
};

struct ShareEntry {
  int32_t upto;  // tokens to this instance and those of lower rank
  int32_t physical_id;
};

// The instances of expert e are the entries begin[e] .. begin[e + 1] - 1, by ascending rank.
struct ShareTable {
  int32_t* begin;       // [E + 1]
  ShareEntry* entries;  // [E + G * S]
};

// A team's working memory.
struct ShareScratch {
  Turn* turns;     // [G]
  int32_t* rank;   // [G]
  int32_t* quota;  // [G]
};

// What compute_shares() and reroute_tokens() look for, in their order.
enum class FaultStage : uint64_t {
  kSlotExpert,  // position in slot_expert
  kSlotTwice,   // position in slot_expert
  kLoad,        // position in load
  kSums,        // three for each expert: its load, a quota of it, the quotas' sum
  kId,          // position in topk_ids
  kCount,       // expert
};

// A fault as a word: of several, the largest is the one that is found first. 0: none.
UEC_HD constexpr uint64_t fault_word(FaultStage stage, int64_t position) {
  return ~(static_cast<uint64_t>(stage) << 56 | static_cast<uint64_t>(position));
}
UEC_HD constexpr FaultStage fault_stage(uint64_t word) {
  return static_cast<FaultStage>(~word >> 56);
}
UEC_HD constexpr int64_t fault_position(uint64_t word) {
  return static_cast<int64_t>(~word & ((uint64_t{1} << 56) - 1));
}

// Writes the expert's part of the table. Returns the worst that this member has found; after a
// fault of any expert the table must not be used.
template <class Team>
UEC_HD inline uint64_t share_into_table(const Team& team, const Topology& topology,
                                        const InstanceIds& ids, const QuotaPlan& plan,
                                        int32_t source, int32_t expert, const ShareScratch& scratch,
                                        const ShareTable& table);

// What compute_shares() says of a fault that share_into_table() has found.
UEC_HD inline RerouteStatus explain_plan_fault(const Topology& topology, const QuotaPlan& plan,
                                               uint64_t word);

// The instance of an expert's token `ordinal`, counted from 0; -1 beyond its load.
UEC_HD inline int32_t find_instance(const int32_t* begin, const ShareEntry* entries, int32_t expert,
                                    int32_t ordinal);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace share_table_detail {

struct Sum {
  uint64_t before, total;
};
template <class Team>
UEC_HD Sum sum_over(const Team& team, uint64_t value) {
  const uint64_t before = team.sum_before(value);
  return {before, team.from(team.size() - 1, before + value)};
}

UEC_HD inline void keep_worst(uint64_t* worst, FaultStage stage, int64_t position) {
  const uint64_t word = fault_word(stage, position);
  if (word > *worst) *worst = word;
}

// Whether the rank of a slot holds its expert already, as main instance or in a slot before.
UEC_HD inline bool holds_twice(const Topology& topology, const QuotaPlan& plan, int32_t slot) {
  const int32_t rank = slot / topology.slots_per_rank;
  const int32_t expert = plan.slot_expert[slot];
  if (topology.home[expert] == rank) return true;
  UEC_ROLLED
  for (int32_t i = rank * topology.slots_per_rank; i < slot; ++i)
    if (plan.slot_expert[i] == expert) return true;
  return false;
}

// Visits the expert's quotas as compute_shares() does, until visit() returns false.
template <class Visit>
UEC_HD void visit_quotas(const Topology& topology, const QuotaPlan& plan, int32_t expert,
                         Visit&& visit) {
  const int32_t slots = topology.slots_per_rank;
  UEC_ROLLED
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    if (topology.home[expert] == r && !visit(plan.home_quota[expert])) return;
    UEC_ROLLED
    for (int32_t i = r * slots; i < (r + 1) * slots; ++i)
      if (plan.slot_expert[i] == expert && !visit(plan.slot_quota[i])) return;
  }
}

}  // namespace share_table_detail

template <class Team>
UEC_HD inline uint64_t share_into_table(const Team& team, const Topology& topology,
                                        const InstanceIds& ids, const QuotaPlan& plan,
                                        int32_t source, int32_t expert, const ShareScratch& scratch,
                                        const ShareTable& table) {
  using namespace share_table_detail;
  const int32_t num_experts = topology.num_experts, slots = topology.slots_per_rank;
  const int32_t home = topology.home[expert];
  uint64_t worst = 0;

  // Replicas of lower experts, of this one, and of this one on ranks before its home.
  uint64_t lower = 0, replicas = 0, ahead = 0;
  const Run own = Run::of(team, topology.num_ranks * slots);
  UEC_ROLLED
  for (int32_t i = own.begin; i < own.end; ++i) {
    const int32_t held = plan.slot_expert[i];
    if (held < -1 || held >= num_experts) keep_worst(&worst, FaultStage::kSlotExpert, i);
    if (held >= 0 && held < expert) ++lower;
    if (held != expert) continue;
    ++replicas;
    if (i / slots < home) ++ahead;
    if (holds_twice(topology, plan, i)) keep_worst(&worst, FaultStage::kSlotTwice, i);
  }
  constexpr int32_t kBits = 21;  // three counts of slots in a word
  constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  const Sum sums = sum_over(team, (lower << kBits | replicas) << kBits | ahead);
  const auto begin = expert + static_cast<int32_t>(sums.total >> 2 * kBits);
  const auto num_instances = 1 + static_cast<int32_t>(sums.total >> kBits & kMask);
  const auto main_at = static_cast<int32_t>(sums.total & kMask);
  if (team.leader()) {
    table.begin[expert] = begin;
    if (expert == num_experts - 1) table.begin[num_experts] = begin + num_instances;
  }
  if (num_instances > topology.num_ranks) return worst;  // some rank holds it twice

  // The instances, by rank.
  if (team.leader()) {
    scratch.rank[main_at] = home;
    scratch.quota[main_at] = plan.home_quota[expert];
    table.entries[begin + main_at].physical_id = ids.main_id[expert];
  }
  auto at = static_cast<int32_t>(sums.before >> kBits & kMask);
  UEC_ROLLED
  for (int32_t i = own.begin; replicas > 0 && i < own.end; ++i) {
    if (plan.slot_expert[i] != expert) continue;
    const int32_t rank = i / slots;
    const int32_t place = at++ + (rank < home ? 0 : 1);
    scratch.rank[place] = rank;
    scratch.quota[place] = plan.slot_quota[i];
    table.entries[begin + place].physical_id = ids.slot_id[rank] + i % slots;
  }
  team.sync();

  // What the shares rest on.
  const int32_t* const load = plan.load + expert;
  int64_t loads = 0, quotas = 0;
  UEC_ROLLED
  for (int32_t r = team.index(); r < topology.num_ranks; r += team.size()) {
    const int64_t position = static_cast<int64_t>(r) * num_experts;
    loads += load[position];
    if (load[position] < 0) keep_worst(&worst, FaultStage::kLoad, position + expert);
  }
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_instances; i += team.size()) {
    quotas += scratch.quota[i];
    if (scratch.quota[i] < 0) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert + 1);
  }
  const auto total_load = static_cast<int64_t>(sum_over(team, static_cast<uint64_t>(loads)).total);
  const auto total_quota =
      static_cast<int64_t>(sum_over(team, static_cast<uint64_t>(quotas)).total);
  if (total_load > kMaxLoad) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert);
  if (total_quota != total_load) keep_worst(&worst, FaultStage::kSums, int64_t{3} * expert + 2);
  if (team.lowest(worst == 0 ? 1 : 0) == 0) return worst;

  if (num_instances == 1) {
    if (team.leader()) table.entries[begin].upto = load[static_cast<int64_t>(source) * num_experts];
    return worst;
  }
  share_expert<1>(team, load, num_experts, source, scratch.rank, num_instances, scratch.quota,
                  scratch.turns);
  UEC_ROLLED
  for (int32_t i = team.index(); i < num_instances; i += team.size())
    table.entries[begin + i].upto = scratch.quota[i];
  return worst;
}

UEC_HD inline RerouteStatus explain_plan_fault(const Topology& topology, const QuotaPlan& plan,
                                               uint64_t word) {
  using namespace share_table_detail;
  const int64_t position = fault_position(word);
  RerouteStatus status;
  switch (fault_stage(word)) {
    case FaultStage::kSlotExpert:
    case FaultStage::kSlotTwice:
      status.fault = RerouteFault::kBadSlot;
      status.position = position;
      status.value = plan.slot_expert[position];
      return status;
    case FaultStage::kLoad:
      status.fault = RerouteFault::kBadCount;
      status.expert = static_cast<int32_t>(position % topology.num_experts);
      status.value = plan.load[position];
      return status;
    default:
      break;
  }
  const auto expert = static_cast<int32_t>(position / 3);
  int64_t loads = 0, quotas = 0;
  UEC_ROLLED
  for (int32_t r = 0; r < topology.num_ranks; ++r)
    loads += plan.load[static_cast<int64_t>(r) * topology.num_experts + expert];
  status.fault = RerouteFault::kBadCount;
  status.expert = expert;
  status.value = loads;
  if (position % 3 == 0) return status;
  visit_quotas(topology, plan, expert, [&](int32_t quota) {
    quotas += quota;
    status.value = quota;
    return quota >= 0;
  });
  if (position % 3 == 1) return status;
  status.fault = RerouteFault::kQuotaMismatch;
  status.counted = quotas;
  status.expected = loads;
  status.value = -1;
  return status;
}

UEC_HD inline int32_t find_instance(const int32_t* begin, const ShareEntry* entries, int32_t expert,
                                    int32_t ordinal) {
  const int32_t end = begin[expert + 1];
  int32_t first = begin[expert];  // everything before it is used up by then
  for (int32_t count = end - first; count > 0;) {
    const int32_t half = count / 2;
    if (entries[first + half].upto > ordinal) {
      count = half;
    } else {
      first += half + 1;
      count -= half + 1;
    }
  }
  return first < end ? entries[first].physical_id : -1;
}

}  // namespace uec
