// The quota-exact reroute: from expert ids to the ids of the instances that serve the tokens.
//
// Two steps. compute_shares() decides, from the plan and the load alone, how many tokens of each
// expert this source rank sends to each instance: every rank could compute every other's. Then
// reroute_tokens() hands out the shares in row-major order of the ids. The readable definition of
// the same is `ultraep_comm/rerouting.py`; the two agree in every integer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/common.hpp"
#include "core/mains.hpp"
#include "core/scratch.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// What a plan says about tokens. Borrowed arrays.
struct QuotaPlan {
  const int32_t* load = nullptr;         // [G, E] tokens by source rank and expert
  const int32_t* slot_expert = nullptr;  // [G, S] expert in the slot, -1 empty
  const int32_t* slot_quota = nullptr;   // [G, S] ignored where the slot is empty
  const int32_t* home_quota = nullptr;   // [E]
};

enum class RerouteFault : int32_t {
  kNone = 0,
  kBadCount,       // a load or quota of `expert` is `value`: below 0, or their sum above kMaxLoad
  kBadSlot,        // slot_expert[position] is `value`: no expert, or its rank has it already
  kQuotaMismatch,  // the quotas of `expert` sum to `counted`, its load to `expected`
  kIdOutOfRange,   // topk_ids[position] (row-major) is `value`: neither -1 nor an expert
  kCountMismatch,  // topk_ids has `expert` `counted` times, load[rank] says `expected`
};

// The first fault found, or kNone. Fields that the fault does not name are -1.
struct RerouteStatus {
  RerouteFault fault = RerouteFault::kNone;
  int32_t expert = -1;
  int64_t counted = -1;
  int64_t expected = -1;
  int64_t position = -1;
  int64_t value = -1;
};

// Working memory, and what compute_shares() leaves for reroute_tokens(). `memory` is aligned to 8
// bytes and has reroute_scratch_bytes() bytes; nothing in it needs to be initialised.
//
// The instances of expert e are the entries begin[e] .. begin[e + 1] - 1, by ascending rank.
struct RerouteScratch {
  int64_t* expert_load;  // [E] tokens over all sources
  int64_t* counted;      // [E] tokens met so far in topk_ids
  int32_t* begin;        // [E + 1]
  int32_t* cursor;       // [E] entry that receives the expert's next token
  int32_t* mains_begin;  // [G + 1]
  int32_t* mains;        // [E]
  int32_t* physical_id;  // [E + G * S]
  int32_t* rank;         // [E + G * S]
  int32_t* quota;        // [E + G * S] what later sources may still use
  int32_t* local;        // [E + G * S] tokens that the instance's own rank keeps
  int32_t* share_end;    // [E + G * S] cumulative tokens from this source rank
  int64_t bytes;

  UEC_HD RerouteScratch(const Topology& topology, std::byte* memory) {
    const int64_t num_experts = topology.num_experts;
    const int64_t num_instances =
        num_experts + static_cast<int64_t>(topology.num_ranks) * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    expert_load = cutter.take<int64_t>(num_experts);
    counted = cutter.take<int64_t>(num_experts);
    begin = cutter.take<int32_t>(num_experts + 1);
    cursor = cutter.take<int32_t>(num_experts);
    mains_begin = cutter.take<int32_t>(topology.num_ranks + 1);
    mains = cutter.take<int32_t>(num_experts);
    physical_id = cutter.take<int32_t>(num_instances);
    rank = cutter.take<int32_t>(num_instances);
    quota = cutter.take<int32_t>(num_instances);
    local = cutter.take<int32_t>(num_instances);
    share_end = cutter.take<int32_t>(num_instances);
    bytes = cutter.used_bytes();
  }
};

UEC_HD inline int64_t reroute_scratch_bytes(const Topology& topology) {
  return RerouteScratch(topology, nullptr).bytes;
}

// Fills the instances and this rank's cumulative shares. Checks all of the plan that memory safety
// and exactness rest on; after a fault the scratch must not be used.
UEC_HD inline RerouteStatus compute_shares(const Topology& topology, const QuotaPlan& plan,
                                           int32_t source, const RerouteScratch& scratch);

// Writes the physical instance id of each of `num_ids` expert ids; -1 stays -1. Token j of an
// expert, counted in the order of the ids, goes to the first instance whose cumulative share
// exceeds j. `out` may be `topk_ids`. After a fault the contents of `out` mean nothing.
//
//   source_load [E] the source rank's row of the load, as given to compute_shares
template <typename Id>
UEC_HD inline RerouteStatus reroute_tokens(const Id* topk_ids, int64_t num_ids, int32_t num_experts,
                                           const int32_t* source_load,
                                           const RerouteScratch& scratch, Id* out);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace reroute_detail {

// Adds an instance to its expert's list, where `cursor` counts the entries so far.
UEC_HD inline void append_instance(const RerouteScratch& s, int32_t expert, int32_t rank,
                                   int32_t physical_id, int32_t quota) {
  const int32_t i = s.cursor[expert]++;
  s.rank[i] = rank;
  s.physical_id[i] = physical_id;
  s.quota[i] = quota;
}

// Lists the instances of every expert. Ranks are visited in order, so each list is sorted by rank.
UEC_HD inline RerouteStatus list_instances(const Topology& topology, const QuotaPlan& plan,
                                           const RerouteScratch& s) {
  const int32_t num_experts = topology.num_experts;
  const int32_t num_ranks = topology.num_ranks;
  const int32_t slots = topology.slots_per_rank;
  const int32_t stride = group_mains(topology, s.mains_begin, s.mains) + slots;

  s.begin[0] = 0;
  for (int32_t e = 0; e < num_experts; ++e) s.begin[e + 1] = 1;
  for (int32_t i = 0; i < num_ranks * slots; ++i) {
    const int32_t expert = plan.slot_expert[i];
    if (expert == -1) continue;
    if (expert < 0 || expert >= num_experts) {
      return {.fault = RerouteFault::kBadSlot, .position = i, .value = expert};
    }
    ++s.begin[expert + 1];
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    s.begin[e + 1] += s.begin[e];
    s.cursor[e] = s.begin[e];
  }

  for (int32_t r = 0; r < num_ranks; ++r) {
    const int32_t num_mains = s.mains_begin[r + 1] - s.mains_begin[r];
    for (int32_t i = 0; i < num_mains; ++i) {
      const int32_t expert = s.mains[s.mains_begin[r] + i];
      append_instance(s, expert, r, r * stride + i, plan.home_quota[expert]);
    }
    for (int32_t i = 0; i < slots; ++i) {
      const int32_t expert = plan.slot_expert[r * slots + i];
      if (expert == -1) continue;
      const int32_t next = s.cursor[expert];
      if (next > s.begin[expert] && s.rank[next - 1] == r) {
        return {.fault = RerouteFault::kBadSlot, .position = r * slots + i, .value = expert};
      }
      append_instance(s, expert, r, r * stride + num_mains + i, plan.slot_quota[r * slots + i]);
    }
  }
  return {};
}

// Everything below rests on this: nothing is negative, each expert's quotas sum to its load, and
// that stays below 2^31.
UEC_HD inline RerouteStatus check_sums(const Topology& topology, const QuotaPlan& plan,
                                       const RerouteScratch& s) {
  const int32_t num_experts = topology.num_experts;
  for (int32_t e = 0; e < num_experts; ++e) s.expert_load[e] = 0;
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    const int32_t* row = plan.load + static_cast<int64_t>(r) * num_experts;
    for (int32_t e = 0; e < num_experts; ++e) {
      if (row[e] < 0) return {.fault = RerouteFault::kBadCount, .expert = e, .value = row[e]};
      s.expert_load[e] += row[e];
    }
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    if (s.expert_load[e] > kMaxLoad) {
      return {.fault = RerouteFault::kBadCount, .expert = e, .value = s.expert_load[e]};
    }
    int64_t sum = 0;
    for (int32_t i = s.begin[e]; i < s.begin[e + 1]; ++i) {
      if (s.quota[i] < 0) {
        return {.fault = RerouteFault::kBadCount, .expert = e, .value = s.quota[i]};
      }
      sum += s.quota[i];
    }
    if (sum != s.expert_load[e]) {
      return {.fault = RerouteFault::kQuotaMismatch,
              .expert = e,
              .counted = sum,
              .expected = s.expert_load[e]};
    }
  }
  return {};
}

// Cumulative shares of one expert with replicas. `load` is the expert's column, `stride` apart.
UEC_HD inline void share_expert(const int32_t* load, int64_t stride, int32_t source, int32_t begin,
                                int32_t end, const RerouteScratch& s) {
  // Locality first: a rank with an instance uses that quota for its own tokens.
  int64_t remaining = 0;
  int64_t residual = load[source * stride];
  for (int32_t i = begin; i < end; ++i) {
    s.local[i] = static_cast<int32_t>(min64(load[s.rank[i] * stride], s.quota[i]));
    s.quota[i] -= s.local[i];
    remaining += s.quota[i];
    s.share_end[i] = 0;
    if (s.rank[i] == source) {
      residual -= s.local[i];
      s.share_end[i] = s.local[i];
    }
  }
  // The rest in proportion, one source after the other, up to this one. Sums match, so a source's
  // rest never exceeds what remains, and no share exceeds its quota. Both factors of a product are
  // parts of one expert's load, below 2^31, so the product is below 2^62.
  const int32_t last_source = residual > 0 ? source : -1;
  int32_t next_local = begin;
  for (int32_t r = 0; r <= last_source; ++r) {
    int64_t rest = load[r * stride];
    if (next_local < end && s.rank[next_local] == r) rest -= s.local[next_local++];
    if (rest == 0) continue;
    int64_t cumulative_quota = 0;
    int64_t given = 0;
    for (int32_t i = begin; i < end; ++i) {
      cumulative_quota += s.quota[i];
      const int64_t upto = rest * cumulative_quota / remaining;
      const int32_t share = static_cast<int32_t>(upto - given);
      given = upto;
      s.quota[i] -= share;
      if (r == source) s.share_end[i] += share;
    }
    remaining -= rest;
  }
  for (int32_t i = begin + 1; i < end; ++i) s.share_end[i] += s.share_end[i - 1];
}

}  // namespace reroute_detail

UEC_HD inline RerouteStatus compute_shares(const Topology& topology, const QuotaPlan& plan,
                                           int32_t source, const RerouteScratch& scratch) {
  using namespace reroute_detail;
  RerouteStatus status = list_instances(topology, plan, scratch);
  if (status.fault == RerouteFault::kNone) status = check_sums(topology, plan, scratch);
  if (status.fault != RerouteFault::kNone) return status;
  for (int32_t e = 0; e < topology.num_experts; ++e) {
    const int32_t begin = scratch.begin[e], end = scratch.begin[e + 1];
    if (end - begin == 1) {
      scratch.share_end[begin] = plan.load[static_cast<int64_t>(source) * topology.num_experts + e];
    } else {
      share_expert(plan.load + e, topology.num_experts, source, begin, end, scratch);
    }
  }
  return status;
}

template <typename Id>
UEC_HD inline RerouteStatus reroute_tokens(const Id* topk_ids, int64_t num_ids, int32_t num_experts,
                                           const int32_t* source_load,
                                           const RerouteScratch& scratch, Id* out) {
  const RerouteScratch& s = scratch;
  for (int32_t e = 0; e < num_experts; ++e) {
    s.counted[e] = 0;
    s.cursor[e] = s.begin[e];
  }
  for (int64_t j = 0; j < num_ids; ++j) {
    const Id expert = topk_ids[j];
    if (expert < 0 || expert >= num_experts) {
      if (expert != -1) {
        return {.fault = RerouteFault::kIdOutOfRange, .position = j, .value = expert};
      }
      out[j] = -1;
      continue;
    }
    // A token beyond the load has no instance: count it for the report, and look no further.
    const int64_t ordinal = s.counted[expert]++;
    if (ordinal >= source_load[expert]) continue;
    int32_t i = s.cursor[expert];
    while (ordinal >= s.share_end[i]) ++i;  // ends: the last share_end is the load
    s.cursor[expert] = i;
    out[j] = static_cast<Id>(s.physical_id[i]);
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    if (s.counted[e] != source_load[e]) {
      return {.fault = RerouteFault::kCountMismatch,
              .expert = e,
              .counted = s.counted[e],
              .expected = source_load[e]};
    }
  }
  return {};
}

}  // namespace uec
