// Where an expert's tokens can go, given who holds it: the planner on top of residents asks this
// after every change (resident_search.hpp).
//
// The ranks are the nodes of a flow. A rank hands tokens of an expert to any other rank that holds
// the expert: from its main instance or a slot, whatever is there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/mains.hpp"
#include "core/base/scratch.hpp"

namespace uec {

// Who holds what, and every instance's quota. One block of memory, so that it is copied as a whole.
struct Holding {
  int64_t* tokens;       // [G] quotas on a rank
  int32_t* home_quota;   // [E]
  int32_t* first_slot;   // [E] that holds the expert, or -1
  int32_t* slot_quota;   // [G * S]
  int32_t* slot_expert;  // [G * S] or -1
  int32_t* next_slot;    // [G * S] that holds the same expert, or -1
  int64_t bytes;

  UEC_HD Holding(const Topology& topology, std::byte* memory) {
    const int64_t num_slots = int64_t{topology.num_ranks} * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    tokens = cutter.take<int64_t>(topology.num_ranks);
    home_quota = cutter.take<int32_t>(topology.num_experts);
    first_slot = cutter.take<int32_t>(topology.num_experts);
    slot_quota = cutter.take<int32_t>(num_slots);
    slot_expert = cutter.take<int32_t>(num_slots);
    next_slot = cutter.take<int32_t>(num_slots);
    bytes = round_up(cutter.used_bytes(), 8);
  }

  UEC_HD void copy(const Holding& from) const {
    __builtin_memcpy(tokens, from.tokens, static_cast<size_t>(bytes));
  }

  UEC_HD void add(int32_t slot, int32_t expert) const {
    slot_expert[slot] = expert;
    next_slot[slot] = first_slot[expert];
    first_slot[expert] = slot;
  }
  UEC_HD void remove(int32_t slot) const {
    int32_t* link = &first_slot[slot_expert[slot]];
    while (*link != slot) link = &next_slot[*link];
    *link = next_slot[slot];
    slot_expert[slot] = -1;
  }
};

struct FlowScratch {
  int64_t* reach;     // [G] tokens that can get there from the first rank of `queue`
  int32_t* queue;     // [G] ranks, in the order in which they were reached
  int32_t* before;    // [G] the rank from which one was reached
  int32_t* given;     // [G] the instance there whose tokens go: a slot, or ~expert for the main one
  int32_t* taken;     // [G] the instance that takes them
  int32_t* seen;      // [G] the search that reached a rank last
  int32_t* is_stuck;  // [G]
  int32_t* rank_of;   // [G * S] of a slot: looked up faster than divided
  int64_t bytes;

  UEC_HD FlowScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks;
    ScratchCutter cutter(memory);
    reach = cutter.take<int64_t>(g);
    queue = cutter.take<int32_t>(g);
    before = cutter.take<int32_t>(g);
    given = cutter.take<int32_t>(g);
    taken = cutter.take<int32_t>(g);
    seen = cutter.take<int32_t>(g);
    is_stuck = cutter.take<int32_t>(g);
    rank_of = cutter.take<int32_t>(g * topology.slots_per_rank);
    bytes = round_up(cutter.used_bytes(), 8);
  }
};

// The flow under a threshold: no rank is to have more tokens.
class Flow {
 public:
  UEC_HD Flow(const Topology& topology, const int32_t* mains_begin, const int32_t* mains,
              const FlowScratch& scratch)
      : t_(topology), mains_begin_(mains_begin), mains_(mains), s_(scratch) {
    for (int32_t r = 0; r < t_.num_ranks; ++r) s_.seen[r] = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r)
      for (int32_t i = 0; i < t_.slots_per_rank; ++i) s_.rank_of[r * t_.slots_per_rank + i] = r;
  }

  UEC_HD int32_t rank_of(int32_t slot) const { return s_.rank_of[slot]; }
  UEC_HD void set_threshold(int64_t threshold) { threshold_ = threshold; }
  UEC_HD int64_t threshold() const { return threshold_; }
  UEC_HD int64_t room(const Holding& h, int32_t rank) const { return threshold_ - h.tokens[rank]; }
  UEC_HD int64_t excess(const Holding& h, int32_t rank) const { return max64(-room(h, rank), 0); }
  UEC_HD int64_t excess(const Holding& h) const {
    int64_t sum = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r) sum += excess(h, r);
    return sum;
  }

  // Hands the excess of a rank on, as far as it goes. Where not all of it does, its reach is what
  // the last search has seen: ranks without room, which hold all that they could hand on.
  UEC_HD bool relieve(const Holding& h, int32_t rank) { return relieve(h, rank, false); }
  // All ranks. A rank of which some excess stays, and all in its reach, are not searched again.
  UEC_HD void relieve_all(const Holding& h) {
    for (int32_t r = 0; r < t_.num_ranks; ++r) s_.is_stuck[r] = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      if (relieve(h, r, true)) continue;
      for (int32_t i = 0; i < count_; ++i) s_.is_stuck[s_.queue[i]] = 1;
    }
    forget();  // the reach of such a search lacks ranks that were stuck before
  }

  // To be called when holders or quotas have changed in another way.
  UEC_HD void forget() { stuck_ = -1; }

  // The reach of the last rank that could not be relieved: in the order of the search.
  UEC_HD int32_t count() const { return count_; }
  UEC_HD int32_t reached(int32_t i) const { return s_.queue[i]; }
  UEC_HD bool is_reached(int32_t rank) const { return s_.seen[rank] == search_; }
  // Tokens that may leave from there for the good of the ranks that have too many.
  UEC_HD int64_t supply(int32_t rank) const { return s_.reach[rank]; }
  UEC_HD void measure_supply(const Holding& h) const {
    s_.reach[s_.queue[0]] = excess(h, s_.queue[0]);
    for (int32_t i = 1; i < count_; ++i) {
      const int32_t r = s_.queue[i];
      s_.reach[r] = min64(s_.reach[s_.before[r]], quota(h, s_.given[r])) + excess(h, r);
    }
  }

 private:
  UEC_HD static int32_t& quota(const Holding& h, int32_t instance) {
    return instance < 0 ? h.home_quota[~instance] : h.slot_quota[instance];
  }

  UEC_HD bool relieve(const Holding& h, int32_t rank, bool skip_stuck) {
    while (excess(h, rank) > 0) {
      if (rank == stuck_) return false;
      stuck_ = -1;
      const int32_t end = search(h, rank, skip_stuck);
      if (end < 0) {
        stuck_ = rank;
        return false;
      }
      int64_t tokens = min64(excess(h, rank), room(h, end));
      for (int32_t r = end; r != rank; r = s_.before[r])
        tokens = min64(tokens, quota(h, s_.given[r]));
      for (int32_t r = end; r != rank; r = s_.before[r]) {
        quota(h, s_.given[r]) -= static_cast<int32_t>(tokens);
        quota(h, s_.taken[r]) += static_cast<int32_t>(tokens);
      }
      h.tokens[rank] -= tokens;
      h.tokens[end] += tokens;
    }
    return true;
  }

  // Breadth first. Returns the first rank with room, or -1.
  UEC_HD int32_t search(const Holding& h, int32_t start, bool skip_stuck) {
    const int32_t slots = t_.slots_per_rank;
    // Copies of members, which stores to arrays might change for all that a compiler knows.
    const int32_t mark = ++search_;
    const int64_t threshold = threshold_;
    int32_t count = 1, from = start;
    s_.seen[start] = mark;
    s_.queue[0] = start;
    const auto has_room = [&](int32_t rank, int32_t given, int32_t taken) {
      if (s_.seen[rank] == mark || (skip_stuck && s_.is_stuck[rank] != 0)) return false;
      s_.seen[rank] = mark;
      s_.before[rank] = from;
      s_.given[rank] = given;
      s_.taken[rank] = taken;
      s_.queue[count++] = rank;
      return h.tokens[rank] < threshold;
    };
    for (int32_t i = 0; i < count; ++i) {
      from = s_.queue[i];
      for (int32_t m = mains_begin_[from]; m < mains_begin_[from + 1]; ++m) {
        const int32_t e = mains_[m];
        if (h.first_slot[e] < 0 || h.home_quota[e] == 0) continue;
        for (int32_t to = h.first_slot[e]; to >= 0; to = h.next_slot[to])
          if (has_room(rank_of(to), ~e, to)) return rank_of(to);
      }
      for (int32_t given = from * slots; given < (from + 1) * slots; ++given) {
        if (h.slot_quota[given] == 0) continue;
        const int32_t e = h.slot_expert[given];
        if (has_room(t_.home[e], given, ~e)) return t_.home[e];
        for (int32_t to = h.first_slot[e]; to >= 0; to = h.next_slot[to])
          if (to != given && has_room(rank_of(to), given, to)) return rank_of(to);
      }
    }
    count_ = count;
    return -1;
  }

  const Topology& t_;
  const int32_t* const mains_begin_;
  const int32_t* const mains_;
  const FlowScratch s_;
  int64_t threshold_ = 0;
  int32_t search_ = 0, count_ = 0;
  int32_t stuck_ = -1;  // the rank of the last search, if that failed and nothing has changed
};

}  // namespace uec
