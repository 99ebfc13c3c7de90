// Where an expert's tokens can go, given who holds it: the planner on top of residents asks this
// after every change (resident_search.hpp).
//
// A rank hands tokens of an expert to any other rank that holds the expert: from its main instance
// or a slot, whatever is there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"

namespace uec {

// Who holds what, and every instance's quota. One block of memory, so that it is copied as a whole.
struct Assignment {
  int64_t* over;         // [G] tokens of a rank above the threshold
  int32_t* home_quota;   // [E]
  int32_t* copies;       // [E] slots that hold the expert
  int32_t* slot_quota;   // [G * S]
  int32_t* slot_expert;  // [G * S] or -1
  int64_t bytes;         // whole words of 8 bytes

  UEC_HD Assignment(const Topology& topology, std::byte* memory) {
    const int64_t num_slots = int64_t{topology.num_ranks} * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    over = cutter.take<int64_t>(topology.num_ranks);
    home_quota = cutter.take<int32_t>(topology.num_experts);
    copies = cutter.take<int32_t>(topology.num_experts);
    slot_quota = cutter.take<int32_t>(num_slots);
    slot_expert = cutter.take<int32_t>(num_slots);
    bytes = cutter.used_bytes();
  }

  // By a team, whose members have met since they looked at what was there.
  UEC_HD void copy(SingleThread, const Assignment& from) const {
    __builtin_memcpy(over, from.over, static_cast<size_t>(bytes));
  }
  template <class Team>
  UEC_HD void copy(Team team, const Assignment& from) const {
    const auto count = static_cast<int32_t>(bytes / 8);
    UEC_UNROLLED_BY_4
    for (int32_t i = team.index(); i < count; i += team.size()) over[i] = from.over[i];
    team.sync();
  }
};

// How tokens get to a rank. An instance is a slot, or ~expert for the main one.
struct Reached {
  int32_t given, taken;  // the instances of the last step
  int32_t came_from;     // rank
  int32_t root;          // the rank from which they come
  int32_t limit;         // tokens
};

struct FlowScratch {
  Reached* reached;     // [G] of ranks that have a depth
  int32_t* depth;       // [G] steps from the rank where a search began, on top of all before it
  uint32_t* first;      // [G] the first slot whose expert leads there
  uint32_t* best;       // [G] of a root: the best rank with room in its tree
  uint32_t* giver;      // [E] the first instance of the last ranks that has tokens: 0, or slot + 1
  int32_t* slot_home;   // [G * S] home of a slot's expert; the rank itself, if it is empty
  int32_t* slot_rank;   // [G * S] looked up faster than divided
  int32_t* queue;       // [G] of one thread: ranks as they are reached
  int32_t* experts;     // [E] of one thread: that the last ranks give
  int32_t* spread;      // [E] of one thread: the depth at which an expert was given
  int32_t* first_slot;  // [G] of one thread: that holds an expert whose home the rank is, or -1
  int32_t* next_slot;   // [G * S] likewise, behind a slot
  int64_t bytes;

  UEC_HD FlowScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks, num_slots = g * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    reached = cutter.take<Reached>(g);
    depth = cutter.take<int32_t>(g);
    first = cutter.take<uint32_t>(g);
    best = cutter.take<uint32_t>(g);
    giver = cutter.take<uint32_t>(topology.num_experts);
    slot_home = cutter.take<int32_t>(num_slots);
    slot_rank = cutter.take<int32_t>(num_slots);
    queue = cutter.take<int32_t>(g);
    experts = cutter.take<int32_t>(topology.num_experts);
    spread = cutter.take<int32_t>(topology.num_experts);
    first_slot = cutter.take<int32_t>(g);
    next_slot = cutter.take<int32_t>(num_slots);
    bytes = round_up(cutter.used_bytes(), 8);
  }
};

// All members of a team call its functions, and have the same answers, unless it says otherwise.
template <class Team>
class Flow {
 public:
  UEC_HD Flow(const Topology& topology, const FlowScratch& scratch) : t_(topology), s_(scratch) {}

  // Calls `visit(slot, rank)` of this member's slots.
  template <class Visit>
  UEC_HD void each_slot(const Visit& visit) const {
    each_slot(team_, visit);
  }
  // Calls `visit(slot, rank, expert, home)` of this member's slots that hold an expert, if
  // find_reach() or relieve_all() came after they were filled.
  template <class Visit>
  UEC_HD void each_edge(const Assignment& h, const Visit& visit) const {
    const FlowScratch s = s_;  // as in grow()
    const int32_t num_slots = t_.num_ranks * t_.slots_per_rank;
    for (int32_t i = team_.index(); i < num_slots; i += team_.size())
      if (h.slot_expert[i] >= 0) visit(i, s.slot_rank[i], h.slot_expert[i], s.slot_home[i]);
  }

  // By one member: tokens of the main instance, for a slot that holds the expert.
  UEC_HD void give(const Assignment& h, int32_t slot, int32_t tokens) const {
    const int32_t e = h.slot_expert[slot];
    h.slot_quota[slot] += tokens;
    h.home_quota[e] -= tokens;
    h.over[slot / t_.slots_per_rank] += tokens;
    h.over[t_.home[e]] -= tokens;
  }
  // Puts an expert, or -1, into a slot, whose tokens go home. The members have met since they
  // looked at what was there.
  UEC_HD void put(const Assignment& h, int32_t slot, int32_t expert) const {
    if (team_.leader()) {
      if (h.slot_quota[slot] > 0) give(h, slot, -h.slot_quota[slot]);
      if (h.slot_expert[slot] >= 0) --h.copies[h.slot_expert[slot]];
      if (expert >= 0) ++h.copies[expert];
      h.slot_expert[slot] = expert;
    }
    team_.sync();
  }

  // Shifts tokens from ranks with too many to ranks with room, as many as can be. Returns how many
  // are too many still.
  UEC_HD int64_t relieve_all(const Assignment& h) {
    find_edges(h);
    while (grow(team_, h, -1)) hand_on(team_, h);
    int64_t excess = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size())
      excess += max64(h.over[r], 0);
    return static_cast<int64_t>(team_.sum(static_cast<uint64_t>(excess)));
  }

  // Finds the ranks to which tokens of a rank without room can get.
  UEC_HD void find_reach(const Assignment& h, int32_t rank) {
    find_edges(h);
    grow(team_, h, rank);
  }
  UEC_HD bool is_reached(int32_t rank) const { return s_.depth[rank] >= base_; }

 private:
  static constexpr int32_t kMaxQuota = INT32_MAX, kIdBits = 24;
  static constexpr uint32_t kNone = ~uint32_t{0};

  template <class Visit>
  UEC_HD void each_slot(SingleThread, const Visit& visit) const {
    for (int32_t r = 0, slot = 0; r < t_.num_ranks; ++r)
      for (const int32_t end = slot + t_.slots_per_rank; slot < end; ++slot) visit(slot, r);
  }
  template <class Members, class Visit>
  UEC_HD void each_slot(Members team, const Visit& visit) const {
    for (Cells at(team, t_.slots_per_rank); at.row < t_.num_ranks; at.next())
      visit(at.row * t_.slots_per_rank + at.column, at.row);
  }

  UEC_HD void find_edges(const Assignment& h) {
    last_ = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) s_.depth[r] = last_;
    each_slot([&](int32_t slot, int32_t rank) {
      s_.slot_rank[slot] = rank;
      s_.slot_home[slot] = h.slot_expert[slot] < 0 ? rank : t_.home[h.slot_expert[slot]];
    });
    if (team_.size() == 1) link_slots();
    team_.sync();
  }
  // By one thread.
  UEC_HD void link_slots() const {
    for (int32_t e = 0; e < t_.num_experts; ++e) s_.spread[e] = last_;
    for (int32_t r = 0; r < t_.num_ranks; ++r) s_.first_slot[r] = -1;
    for (int32_t i = 0; i < t_.num_ranks * t_.slots_per_rank; ++i) {
      const int32_t home = s_.slot_home[i];
      if (home == s_.slot_rank[i]) continue;
      s_.next_slot[i] = s_.first_slot[home];
      s_.first_slot[home] = i;
    }
  }

  UEC_HD static int32_t& quota(const Assignment& h, int32_t instance) {
    return instance < 0 ? h.home_quota[~instance] : h.slot_quota[instance];
  }
  UEC_HD static int32_t room_of(const Assignment& h, int32_t rank) {
    return static_cast<int32_t>(min64(max64(-h.over[rank], 0), kMaxQuota));
  }
  UEC_HD bool is_root(const Assignment& h, int32_t rank, int32_t only) const {
    return only < 0 ? h.over[rank] > 0 : rank == only;
  }
  UEC_HD static Reached root_at(const Assignment& h, int32_t rank) {
    return {0, 0, rank, rank, static_cast<int32_t>(min64(h.over[rank], kMaxQuota))};
  }
  // The step to a rank that takes the expert of one of the slots.
  UEC_HD static Reached way_to(const FlowScratch& s, const Assignment& h, int32_t rank,
                               int32_t slot) {
    const int32_t e = h.slot_expert[slot], home = s.slot_home[slot];
    const auto giver = static_cast<int32_t>(s.giver[e]);
    const int32_t given = giver == 0 ? ~e : giver - 1;
    const int32_t from = giver == 0 ? home : s.slot_rank[given];
    const Reached& before = s.reached[from];
    return {given, home == rank ? ~e : slot, from, before.root,
            min32(before.limit, quota(h, given))};
  }

  // The order of the ranks that a tree reaches: most room first, in powers of two, then by id.
  UEC_HD static uint32_t order_of(int32_t rank, int32_t room) {
    return static_cast<uint32_t>(32 - num_bits(room)) << kIdBits | static_cast<uint32_t>(rank);
  }

  // By one member: hands tokens of a root on to the best rank of its tree. No other tree has any
  // of the ranks on the way.
  UEC_HD void hand_on(const Assignment& h, int32_t root) const {
    const auto end = static_cast<int32_t>(s_.best[root] & ((1u << kIdBits) - 1));
    const auto tokens =
        static_cast<int32_t>(min64(min64(h.over[root], -h.over[end]), s_.reached[end].limit));
    h.over[root] -= tokens;
    h.over[end] += tokens;
    for (int32_t r = end; r != root;) {
      const Reached way = s_.reached[r];
      quota(h, way.given) -= tokens;
      quota(h, way.taken) += tokens;
      r = way.came_from;
    }
  }
  UEC_HD void hand_on(SingleThread, const Assignment& h) const {
    for (int32_t q = 0; q < num_roots_; ++q)
      if (s_.best[s_.queue[q]] != kNone) hand_on(h, s_.queue[q]);
  }
  template <class Members>
  UEC_HD void hand_on(Members team, const Assignment& h) const {
    for (int32_t r = team.index(); r < t_.num_ranks; r += team.size())
      if (s_.depth[r] == base_ && s_.best[r] != kNone) hand_on(h, r);
    team.sync();
  }

  // Breadth first, a tree from each rank with too many tokens, or from `only` one if that is not
  // -1. Returns whether ranks with room were reached: the nearest, of which each root has the best.
  // The first instance gives an expert, and a rank takes that of its first slot.
  UEC_HD bool grow(SingleThread, const Assignment& assignment, int32_t only) {
    // Copies of members, which stores to arrays might change for all that a compiler knows.
    const FlowScratch s = s_;
    const Assignment h = assignment;
    const int32_t base = base_ = ++last_;
    int32_t end = 0;
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      if (!is_root(h, r, only)) continue;
      s.depth[r] = base;
      s.best[r] = kNone;
      s.reached[r] = root_at(h, r);
      s.queue[end++] = r;
    }
    num_roots_ = end;
    for (int32_t begin = 0; begin < end;) {
      const int32_t depth = ++last_;
      int32_t fresh = end, num_experts = 0;
      const auto give = [&](int32_t e, uint32_t giver) {
        if (s.spread[e] < base) {
          s.spread[e] = depth;
          s.experts[num_experts++] = e;
        } else if (s.spread[e] != depth || s.giver[e] < giver) {
          return;
        }
        s.giver[e] = giver;
      };
      const auto take = [&](int32_t rank, uint32_t slot) {
        if (s.depth[rank] < base) {
          s.depth[rank] = depth;
          s.queue[fresh++] = rank;
        } else if (s.depth[rank] != depth || s.first[rank] < slot) {
          return;
        }
        s.first[rank] = slot;
      };
      for (int32_t q = begin; q < end; ++q) {
        const int32_t from = s.queue[q];
        for (int32_t i = s.first_slot[from]; i >= 0; i = s.next_slot[i])
          if (h.home_quota[h.slot_expert[i]] > 0) give(h.slot_expert[i], 0);
        for (int32_t i = from * t_.slots_per_rank; i < (from + 1) * t_.slots_per_rank; ++i)
          if (h.slot_quota[i] > 0) give(h.slot_expert[i], static_cast<uint32_t>(i) + 1);
      }
      for (int32_t n = 0; n < num_experts; ++n) {
        const int32_t e = s.experts[n], home = t_.home[e];
        for (int32_t i = s.first_slot[home]; i >= 0; i = s.next_slot[i]) {
          if (h.slot_expert[i] != e) continue;
          take(s.slot_rank[i], static_cast<uint32_t>(i));
          take(home, static_cast<uint32_t>(i));
        }
      }
      bool has_room = false;
      for (int32_t q = end; q < fresh; ++q) {
        const int32_t rank = s.queue[q], room = room_of(h, rank);
        s.reached[rank] = way_to(s, h, rank, static_cast<int32_t>(s.first[rank]));
        if (room == 0) continue;
        has_room = true;
        uint32_t& best = s.best[s.reached[rank].root];
        best = min_u32(best, order_of(rank, room));
      }
      if (has_room) return true;
      begin = end;
      end = fresh;
    }
    return false;
  }

  // The same by a team: each member looks at some of the slots, level by level.
  template <class Members>
  UEC_HD bool grow(Members team, const Assignment& assignment, int32_t only) {
    const FlowScratch s = s_;  // as above
    const Assignment h = assignment;
    const int32_t num_ranks = t_.num_ranks, num_experts = t_.num_experts;
    const int32_t num_slots = num_ranks * t_.slots_per_rank, base = last_ + 1;
    int32_t depth = base;
    for (int32_t r = team.index(); r < num_ranks; r += team.size()) {
      s.first[r] = s.best[r] = kNone;
      if (!is_root(h, r, only)) continue;
      s.depth[r] = base;
      s.reached[r] = root_at(h, r);
    }
    UEC_UNROLLED_BY_4
    for (int32_t e = team.index(); e < num_experts; e += team.size()) s.giver[e] = kNone;
    team.sync();
    uint32_t found = 1;  // 2: nothing; 1: a rank without room; 0: one with room
    for (; found == 1; ++depth) {
      for (int32_t i = team.index(); i < num_slots; i += team.size()) {
        const int32_t e = h.slot_expert[i], home = s.slot_home[i], rank = s.slot_rank[i];
        if (e < 0) continue;
        const bool from_home = s.depth[home] == depth && h.home_quota[e] > 0;
        const bool from_slot = s.depth[rank] == depth && h.slot_quota[i] > 0;
        if (from_home || from_slot)
          team.atomic_min(s.giver + e, from_home ? 0 : static_cast<uint32_t>(i) + 1);
      }
      team.sync();
      for (int32_t i = team.index(); i < num_slots; i += team.size()) {
        const int32_t e = h.slot_expert[i], home = s.slot_home[i], rank = s.slot_rank[i];
        if (e < 0 || s.giver[e] == kNone) continue;
        if (s.depth[rank] < base) team.atomic_min(s.first + rank, static_cast<uint32_t>(i));
        if (s.depth[home] < base) team.atomic_min(s.first + home, static_cast<uint32_t>(i));
      }
      team.sync();
      found = 2;
      for (int32_t r = team.index(); r < num_ranks; r += team.size()) {
        const uint32_t slot = s.first[r];
        if (slot == kNone || s.depth[r] >= base) continue;
        s.depth[r] = depth + 1;
        const Reached way = way_to(s, h, r, static_cast<int32_t>(slot));
        s.reached[r] = way;
        const int32_t room = room_of(h, r);
        found = min_u32(found, room > 0 ? 0 : 1);
        if (room > 0) team.atomic_min(s.best + way.root, order_of(r, room));
      }
      found = team.min_sync(found);
    }
    base_ = base;
    last_ = depth;
    return found == 0;
  }

  const Team team_{};
  const Topology& t_;
  const FlowScratch s_;
  int32_t base_ = 0, last_ = 0;  // the last search's least depth, and the greatest
  int32_t num_roots_ = 0;        // of one thread: the first of the queue
};

}  // namespace uec
