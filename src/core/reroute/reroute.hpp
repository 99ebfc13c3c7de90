// The quota-exact reroute: from expert ids to the ids of the instances that serve the tokens.
//
// Two steps. compute_shares() decides, from the plan and the load alone, how many tokens of each
// expert this source rank sends to each instance: every rank could compute every other's. Then
// reroute_tokens() or reroute_map() hands out the shares in row-major order of the routing, a list
// of ids or a map. The readable definition of the same is `tests/reference/reroute.py`; the two
// agree in every integer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/local_experts.hpp"
#include "core/base/scratch.hpp"
#include "core/reroute/shares.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

// What a plan says about tokens. Borrowed arrays.
struct QuotaPlan {
  const int32_t* load = nullptr;         // [G, E] tokens by source rank and expert
  const int32_t* slot_expert = nullptr;  // [G, S] expert in the slot, -1 empty
  const int32_t* slot_quota = nullptr;   // [G, S] ignored where the slot is empty
  const int32_t* home_quota = nullptr;   // [E]
  const int32_t* home = nullptr;         // [E] that it was made for; null: the topology's
};

enum class RerouteFault : int32_t {
  kNone = 0,
  kBadCount,       // a load or quota of `expert` is `value`: below 0, or their sum above kMaxLoad
  kBadSlot,        // slot_expert[position] is `value`: no expert, or its rank has it already
  kQuotaMismatch,  // the quotas of `expert` sum to `counted`, its load to `expected`
  kIdOutOfRange,   // topk_ids[position] (row-major) is `value`: neither -1 nor an expert
  kCountMismatch,  // the routing has `expert` `counted` times, load[rank] says `expected`
  kOtherHome,      // the plan has `expert` at home on rank `value`, the group elsewhere
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

// Where an expert's next token goes. All that a token needs lies together, so that it costs one
// cursor, read and written back.
struct TokenCursor {
  int32_t left;         // tokens that the instance still takes
  int32_t physical_id;  // of the instance
};

// Working memory, and what compute_shares() leaves for the second step. `memory` is aligned to 8
// bytes and has reroute_scratch_bytes() bytes; nothing in it needs to be initialised.
//
// The instances of expert e are the entries begin[e] .. begin[e + 1] - 1, by ascending rank.
struct RerouteScratch {
  int64_t* expert_load;    // [E] tokens over all sources
  int64_t* surplus;        // [E] tokens met beyond the load
  TokenCursor* cursor;     // [E]
  int32_t* begin;          // [E + 1]
  int32_t* next;           // [E] entry to continue with when the cursor has nothing left
  int32_t* local_begin;    // [G + 1]
  int32_t* local_experts;  // [E]
  int32_t* physical_id;    // [E + G * S]
  int32_t* rank;           // [E + G * S]
  int32_t* quota;          // [E + G * S], then cumulative shares of experts with replicas
  int32_t* share;          // [E + G * S] tokens from this source rank
  Turn* turns;             // [G]
  int64_t bytes;

  UEC_HD RerouteScratch(const Topology& topology, std::byte* memory) {
    const int64_t num_experts = topology.num_experts;
    const int64_t num_instances =
        num_experts + static_cast<int64_t>(topology.num_ranks) * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    expert_load = cutter.take<int64_t>(num_experts);
    surplus = cutter.take<int64_t>(num_experts);
    cursor = cutter.take<TokenCursor>(num_experts);
    begin = cutter.take<int32_t>(num_experts + 1);
    next = cutter.take<int32_t>(num_experts);
    local_begin = cutter.take<int32_t>(topology.num_ranks + 1);
    local_experts = cutter.take<int32_t>(num_experts);
    physical_id = cutter.take<int32_t>(num_instances);
    rank = cutter.take<int32_t>(num_instances);
    quota = cutter.take<int32_t>(num_instances);
    share = cutter.take<int32_t>(num_instances);
    turns = cutter.take<Turn>(topology.num_ranks);
    bytes = cutter.used_bytes();
  }
};

UEC_HD inline int64_t reroute_scratch_bytes(const Topology& topology) {
  return RerouteScratch(topology, nullptr).bytes;
}

// Fills the instances and this rank's shares. Checks all of the plan that memory safety
// and exactness rest on; after a fault the scratch must not be used.
UEC_HD inline RerouteStatus compute_shares(const Topology& topology, const QuotaPlan& plan,
                                           int32_t source, const RerouteScratch& scratch);

// Writes the physical instance id of each of `num_ids` expert ids; -1 stays -1. Token j of an
// expert, counted in the order of the ids, goes to the first instance whose cumulative share
// exceeds j. `out` may be `topk_ids`. After a fault the contents of `out` are undefined.
template <typename Id>
UEC_HD inline RerouteStatus reroute_tokens(const Id* topk_ids, int64_t num_ids, int32_t num_experts,
                                           const RerouteScratch& scratch, Id* out);

// Reroutes a routing map, whose ones are the ids in row-major order: for each, its position in
// the map and the position in the physical map that it moves to. Exactly as many pairs are written
// as the load has tokens from this source; after a fault they are undefined.
//
//   routing_map [num_tokens, E] bytes, each 0 or 1; the physical map is [num_tokens, G * P]
//   from, to    [sum of the source's load] row-major positions
UEC_HD inline RerouteStatus reroute_map(const Topology& topology, const uint8_t* routing_map,
                                        int64_t num_tokens, const RerouteScratch& scratch,
                                        int64_t* from, int64_t* to);

// ---------------------------------------------------------------------------------------------
// Implementation

namespace reroute_detail {

// Appends an instance to its expert's list; `next` is the list's current end.
UEC_HD inline void append_instance(const RerouteScratch& s, int32_t expert, int32_t rank,
                                   int32_t physical_id, int32_t quota) {
  const int32_t i = s.next[expert]++;
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
  const int32_t stride = group_local_experts(topology, s.local_begin, s.local_experts) + slots;
  for (int32_t e = 0; plan.home != nullptr && e < num_experts; ++e)
    if (plan.home[e] != topology.home[e])
      return {.fault = RerouteFault::kOtherHome, .expert = e, .value = plan.home[e]};

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
    s.next[e] = s.begin[e];
  }

  for (int32_t r = 0; r < num_ranks; ++r) {
    const int32_t num_local_experts = s.local_begin[r + 1] - s.local_begin[r];
    for (int32_t i = 0; i < num_local_experts; ++i) {
      const int32_t expert = s.local_experts[s.local_begin[r] + i];
      append_instance(s, expert, r, r * stride + i, plan.home_quota[expert]);
    }
    for (int32_t i = 0; i < slots; ++i) {
      const int32_t expert = plan.slot_expert[r * slots + i];
      if (expert == -1) continue;
      const int32_t next = s.next[expert];
      if (next > s.begin[expert] && s.rank[next - 1] == r) {
        return {.fault = RerouteFault::kBadSlot, .position = r * slots + i, .value = expert};
      }
      append_instance(s, expert, r, r * stride + num_local_experts + i,
                      plan.slot_quota[r * slots + i]);
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
    int32_t signs = 0;  // looked at once a row, which leaves the loop to vector instructions
    for (int32_t e = 0; e < num_experts; ++e) {
      s.expert_load[e] += row[e];
      signs |= row[e];
    }
    for (int32_t e = 0; signs < 0; ++e) {
      if (row[e] < 0) return {.fault = RerouteFault::kBadCount, .expert = e, .value = row[e]};
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

// Shares of one expert with replicas, from the quotas of its instances.
UEC_HD inline void share_instances(const Topology& topology, const QuotaPlan& plan, int32_t source,
                                   int32_t expert, const RerouteScratch& s) {
  const int32_t begin = s.begin[expert], end = s.begin[expert + 1];
  const int32_t* const load = plan.load + expert;
  const int64_t stride = topology.num_experts;
  for (int32_t r = 0; r < topology.num_ranks; ++r)
    s.turns[r].rest = static_cast<uint32_t>(load[r * stride]);
  share_expert<4, 1>(SingleThread{}, load[source * stride], source, s.rank + begin, end - begin,
                     s.quota + begin, s.turns);
  for (int32_t i = begin; i < end; ++i) s.share[i] = s.quota[i] - (i > begin ? s.quota[i - 1] : 0);
}

// G * P: ids of instances are below it.
UEC_HD inline int64_t num_instance_ids(const Topology& topology, const RerouteScratch& s) {
  int32_t max_local_experts = 0;
  for (int32_t r = 0; r < topology.num_ranks; ++r) {
    max_local_experts = max32(max_local_experts, s.local_begin[r + 1] - s.local_begin[r]);
  }
  return static_cast<int64_t>(topology.num_ranks) * (max_local_experts + topology.slots_per_rank);
}

// Puts every cursor before its expert's first instance.
UEC_HD inline void reset_cursors(int32_t num_experts, const RerouteScratch& s) {
  for (int32_t e = 0; e < num_experts; ++e) {
    s.cursor[e] = {.left = 0, .physical_id = -1};
    s.next[e] = s.begin[e];
    s.surplus[e] = 0;
  }
}

// The rare half of take_instance(): moves on to the next instance with a share; -1 beyond the load.
UEC_HD inline int32_t take_from_next(int32_t expert, const RerouteScratch& s) {
  while (s.next[expert] < s.begin[expert + 1]) {
    const int32_t i = s.next[expert]++;
    if (s.share[i] == 0) continue;
    s.cursor[expert] = {.left = s.share[i] - 1, .physical_id = s.physical_id[i]};
    return s.physical_id[i];
  }
  ++s.surplus[expert];
  return -1;
}

// The instance of the expert's next token.
UEC_HD inline int32_t take_instance(int32_t expert, const RerouteScratch& s) {
  TokenCursor& cursor = s.cursor[expert];
  if (cursor.left == 0) return take_from_next(expert, s);
  --cursor.left;
  return cursor.physical_id;
}

// Whether every share was used up and no token was left over.
UEC_HD inline RerouteStatus check_counts(int32_t num_experts, const RerouteScratch& s) {
  for (int32_t e = 0; e < num_experts; ++e) {
    int64_t missing = s.cursor[e].left;
    for (int32_t i = s.next[e]; i < s.begin[e + 1]; ++i) missing += s.share[i];
    if (missing == 0 && s.surplus[e] == 0) continue;
    int64_t expected = 0;
    for (int32_t i = s.begin[e]; i < s.begin[e + 1]; ++i) expected += s.share[i];
    return {.fault = RerouteFault::kCountMismatch,
            .expert = e,
            .counted = expected - missing + s.surplus[e],
            .expected = expected};
  }
  return {};
}

// 64 bytes, each 0 or 1, as bits: byte i becomes bit i.
UEC_HD inline uint64_t gather_bits(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int32_t i = 0; i < 64; i += 8) {
    uint64_t word;  // little-endian; the product moves bit 8 * j of it to bit 56 + j
    __builtin_memcpy(&word, bytes + i, 8);
    bits |= (word * 0x0102040810204080 >> 56) << i;
  }
  return bits;
}

// The position of the lowest bit that is set; there is one.
UEC_HD inline int32_t lowest_bit(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return __builtin_ctzll(bits);
#endif
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
      scratch.share[begin] = plan.load[static_cast<int64_t>(source) * topology.num_experts + e];
    } else {
      share_instances(topology, plan, source, e, scratch);
    }
  }
  return status;
}

template <typename Id>
UEC_HD inline RerouteStatus reroute_tokens(const Id* topk_ids, int64_t num_ids, int32_t num_experts,
                                           const RerouteScratch& scratch, Id* out) {
  using namespace reroute_detail;
  reset_cursors(num_experts, scratch);
  for (int64_t j = 0; j < num_ids; ++j) {
    const Id expert = topk_ids[j];
    if (static_cast<uint64_t>(expert) < static_cast<uint64_t>(num_experts)) {
      out[j] = static_cast<Id>(take_instance(static_cast<int32_t>(expert), scratch));
    } else if (expert == -1) {
      out[j] = -1;
    } else {
      return {.fault = RerouteFault::kIdOutOfRange, .position = j, .value = expert};
    }
  }
  return check_counts(num_experts, scratch);
}

UEC_HD inline RerouteStatus reroute_map(const Topology& topology, const uint8_t* routing_map,
                                        int64_t num_tokens, const RerouteScratch& scratch,
                                        int64_t* from, int64_t* to) {
  using namespace reroute_detail;
  const int32_t num_experts = topology.num_experts;
  const int64_t row_size = num_instance_ids(topology, scratch);
  reset_cursors(num_experts, scratch);
  int64_t num_moves = 0;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t row = token * num_experts;
    const auto move = [&](int32_t expert) {
      const int32_t instance = take_instance(expert, scratch);
      if (instance < 0) return;
      from[num_moves] = row + expert;
      to[num_moves++] = token * row_size + instance;
    };
    int32_t first = 0;
    for (; first + 64 <= num_experts; first += 64) {
      uint64_t bits = gather_bits(routing_map + row + first);
      for (; bits != 0; bits &= bits - 1) move(first + lowest_bit(bits));
    }
    for (; first < num_experts; ++first) {
      if (routing_map[row + first] != 0) move(first);
    }
  }
  return check_counts(num_experts, scratch);
}

}  // namespace uec
