// Where an expert's tokens can go, given who holds it: the planner on top of residents asks this
// after every change (resident_search.hpp).
//
// The ranks are the nodes of a flow. A rank hands tokens of an expert to any other rank that holds
// the expert: from its main instance or a slot, whatever is there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/local_experts.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"

namespace uec {

// Who holds what, and every instance's quota. One block of memory, so that it is copied as a whole.
struct Assignment {
  int64_t* tokens;       // [G] quotas on a rank
  int32_t* home_quota;   // [E]
  int32_t* first_slot;   // [E] that holds the expert, or -1
  int32_t* replicas;     // [E] slots that do
  int32_t* slot_quota;   // [G * S]
  int32_t* slot_expert;  // [G * S] or -1
  int32_t* next_slot;    // [G * S] that holds the same expert, or -1
  int32_t* order;        // [num_order()] rises from slot to next_slot
  int64_t bytes;

  UEC_HD Assignment(const Topology& topology, std::byte* memory) {
    const int64_t num_slots = int64_t{topology.num_ranks} * topology.slots_per_rank;
    ScratchCutter cutter(memory);
    tokens = cutter.take<int64_t>(topology.num_ranks);
    home_quota = cutter.take<int32_t>(topology.num_experts);
    first_slot = cutter.take<int32_t>(topology.num_experts);
    replicas = cutter.take<int32_t>(topology.num_experts);
    slot_quota = cutter.take<int32_t>(num_slots);
    slot_expert = cutter.take<int32_t>(num_slots);
    next_slot = cutter.take<int32_t>(num_slots);
    order = cutter.take<int32_t>(num_order(topology));
    bytes = round_up(cutter.used_bytes(), 8);
  }

  // One more than there are slots where that makes whole words of all these.
  UEC_HD static int32_t num_order(const Topology& topology) {
    return topology.num_ranks * topology.slots_per_rank + topology.num_experts % 2;
  }

  // By a team, like what follows unless it says otherwise.
  template <class Team>
  UEC_HD void copy(Team team, const Assignment& from) const {
    team.sync();  // all have looked at what was there
    copy_words(team, from);
    team.sync();
  }

  // By one member.
  UEC_HD void add(int32_t slot, int32_t expert) const {
    const int32_t next = first_slot[expert];
    slot_expert[slot] = expert;
    next_slot[slot] = next;
    order[slot] = next < 0 ? 0 : order[next] - 1;
    first_slot[expert] = slot;
    ++replicas[expert];
  }
  UEC_HD void remove(int32_t slot) const {
    --replicas[slot_expert[slot]];
    int32_t* link = &first_slot[slot_expert[slot]];
    while (*link != slot) link = &next_slot[*link];
    *link = next_slot[slot];
    slot_expert[slot] = -1;
  }

 private:
  UEC_HD void copy_words(SingleThread, const Assignment& from) const {
    __builtin_memcpy(tokens, from.tokens, static_cast<size_t>(bytes));
  }
  template <class Team>
  UEC_HD void copy_words(Team team, const Assignment& from) const {
    const auto count = static_cast<int32_t>(bytes / 8);
    UEC_UNROLLED_BY_4
    for (int32_t i = team.index(); i < count; i += team.size()) tokens[i] = from.tokens[i];
  }
};

struct FlowScratch {
  int64_t* reach;     // [G] tokens that can get there from the first rank of `queue`
  int32_t* queue;     // [G] ranks, in the order in which they were reached
  int32_t* level;     // [G + 1] where ranks that are as many steps away begin in `queue`
  int32_t* before;    // [G] the rank from which one was reached
  int32_t* given;     // [G] the instance there whose tokens go: a slot, or ~expert for the main one
  int32_t* taken;     // [G] the instance that takes them
  int32_t* seen;      // [G] the search that reached a rank last
  int32_t* is_stuck;  // [G]
  int32_t* spread;    // [E] the search that reached all holders of an expert last
  uint32_t* offer;    // [E] of a team: the first instance that has tokens to give
  uint32_t* claim;    // [G] of a team: the same, to a rank
  uint64_t* fresh;    // [G] of a team: what orders the ranks that a level has reached
  int32_t* arrived;   // [G] of a team: these ranks
  int32_t* rank_of;   // [G * S] of a slot: looked up faster than divided
  int64_t bytes;

  UEC_HD FlowScratch(const Topology& topology, std::byte* memory) {
    const int64_t g = topology.num_ranks;
    ScratchCutter cutter(memory);
    reach = cutter.take<int64_t>(g);
    fresh = cutter.take<uint64_t>(g);
    arrived = cutter.take<int32_t>(g);
    queue = cutter.take<int32_t>(g);
    level = cutter.take<int32_t>(g + 1);
    before = cutter.take<int32_t>(g);
    given = cutter.take<int32_t>(g);
    taken = cutter.take<int32_t>(g);
    seen = cutter.take<int32_t>(g);
    is_stuck = cutter.take<int32_t>(g);
    spread = cutter.take<int32_t>(topology.num_experts);
    offer = cutter.take<uint32_t>(topology.num_experts);
    claim = cutter.take<uint32_t>(g);
    rank_of = cutter.take<int32_t>(g * topology.slots_per_rank);
    bytes = round_up(cutter.used_bytes(), 8);
  }
};

// The local experts by home, then id.
struct LocalExperts {
  const int32_t* begin;  // [G + 1]
  const int32_t* ids;    // [E]
  int64_t max_count;     // of a rank
};

// The flow under a threshold: no rank is to have more tokens. All members of a team call its
// functions, and have the same answers.
template <class Team>
class Flow {
 public:
  UEC_HD Flow(const Topology& topology, const LocalExperts& local_experts,
              const FlowScratch& scratch)
      : t_(topology),
        local_experts_(local_experts),
        s_(scratch),
        width_bits_(num_bits(local_experts.max_count + slots())),
        instances_(team_, static_cast<int32_t>(local_experts.max_count) + slots()) {
    for (int32_t e = team_.index(); e < t_.num_experts; e += team_.size()) s_.spread[e] = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) {
      s_.seen[r] = 0;
      for (int32_t i = 0; i < slots(); ++i) s_.rank_of[r * slots() + i] = r;
    }
    team_.sync();
  }

  UEC_HD int32_t rank_of(int32_t slot) const { return s_.rank_of[slot]; }
  UEC_HD void set_threshold(int64_t threshold) { threshold_ = threshold; }
  UEC_HD int64_t threshold() const { return threshold_; }
  UEC_HD int64_t room(const Assignment& h, int32_t rank) const {
    return threshold_ - h.tokens[rank];
  }
  UEC_HD int64_t excess(const Assignment& h, int32_t rank) const {
    return max64(-room(h, rank), 0);
  }
  UEC_HD int64_t excess(const Assignment& h) const {
    int64_t sum = 0;
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) sum += excess(h, r);
    return static_cast<int64_t>(team_.sum(static_cast<uint64_t>(sum)));
  }

  // Moves the excess of a rank to others, as far as it fits. If some stays, the rank's reach is
  // what the last search has seen: ranks without room, which hold all that they could hand on.
  UEC_HD bool relieve(const Assignment& h, int32_t rank) { return relieve(h, rank, false); }
  // Relieves all ranks. A rank that keeps some excess, and its whole reach, are not searched again.
  UEC_HD void relieve_all(const Assignment& h) {
    for (int32_t r = team_.index(); r < t_.num_ranks; r += team_.size()) s_.is_stuck[r] = 0;
    team_.sync();
    for (int32_t r = 0; r < t_.num_ranks; ++r) {
      if (relieve(h, r, true)) continue;
      for (int32_t i = team_.index(); i < count_; i += team_.size()) s_.is_stuck[s_.queue[i]] = 1;
      team_.sync();
    }
    reset_reach();  // the reach of such a search lacks ranks that were stuck before
  }

  // Must be called when holders or quotas have changed in another way.
  UEC_HD void reset_reach() { stuck_ = -1; }

  // The reach of the last rank that could not be relieved: in the order of the search.
  UEC_HD int32_t count() const { return count_; }
  UEC_HD int32_t reached(int32_t i) const { return s_.queue[i]; }
  UEC_HD bool is_reached(int32_t rank) const { return s_.seen[rank] == search_; }
  // Tokens that may leave from there for the good of the ranks that have too many.
  UEC_HD int64_t supply(int32_t rank) const { return s_.reach[rank]; }
  UEC_HD void measure_supply(const Assignment& h) const {
    if (team_.leader()) s_.reach[s_.queue[0]] = excess(h, s_.queue[0]);
    team_.sync();
    for (int32_t l = 0; l < num_levels_; ++l) {
      for (int32_t i = s_.level[l] + team_.index(); i < s_.level[l + 1]; i += team_.size()) {
        const int32_t r = s_.queue[i];
        s_.reach[r] = min64(s_.reach[s_.before[r]], quota(h, s_.given[r])) + excess(h, r);
      }
      team_.sync();
    }
  }

 private:
  static constexpr uint32_t kUnclaimed = ~uint32_t{0};

  UEC_HD int32_t slots() const { return t_.slots_per_rank; }
  UEC_HD static int32_t& quota(const Assignment& h, int32_t instance) {
    return instance < 0 ? h.home_quota[~instance] : h.slot_quota[instance];
  }

  UEC_HD bool relieve(const Assignment& h, int32_t rank, bool skip_stuck) {
    while (excess(h, rank) > 0) {
      if (rank == stuck_) return false;
      stuck_ = search(team_, h, rank, skip_stuck) ? -1 : rank;
    }
    return true;
  }
  // By one member, along the way that the search has found. Returns whether the search can continue
  // as if it had just begun: it would come the same way, since all holders of an expert whose
  // tokens have moved have been reached already, and no instance there has run out of tokens.
  UEC_HD bool hand_on(const Assignment& h, int32_t rank, int32_t end) const {
    int64_t tokens = min64(excess(h, rank), room(h, end));
    for (int32_t r = end; r != rank; r = s_.before[r])
      tokens = min64(tokens, quota(h, s_.given[r]));
    bool has_left = true;
    for (int32_t r = end; r != rank; r = s_.before[r]) {
      int32_t& given = quota(h, s_.given[r]);
      given -= static_cast<int32_t>(tokens);
      has_left &= given > 0;
      quota(h, s_.taken[r]) += static_cast<int32_t>(tokens);
    }
    h.tokens[rank] -= tokens;
    h.tokens[end] += tokens;
    return has_left && excess(h, rank) > 0;
  }

  // Breadth first, from a rank with excess, which goes to ranks with room as they are reached.
  // Returns false if there are no more of them.
  UEC_HD bool search(SingleThread, const Assignment& h, int32_t start, bool skip_stuck) {
    const int32_t slots = t_.slots_per_rank;
    // Copies of members, which stores to arrays might change for all that a compiler knows.
    const int32_t mark = ++search_;
    const int64_t threshold = threshold_;
    int32_t count = 1, from = start;
    s_.seen[start] = mark;
    s_.queue[0] = start;
    // Whether the search ends there.
    const auto reach = [&](int32_t rank, int32_t given, int32_t taken) {
      if (s_.seen[rank] == mark || (skip_stuck && s_.is_stuck[rank] != 0)) return false;
      s_.seen[rank] = mark;
      s_.before[rank] = from;
      s_.given[rank] = given;
      s_.taken[rank] = taken;
      s_.queue[count++] = rank;
      return h.tokens[rank] < threshold && !hand_on(h, start, rank);
    };
    for (int32_t i = 0; i < count; ++i) {
      from = s_.queue[i];
      for (int32_t m = local_experts_.begin[from]; m < local_experts_.begin[from + 1]; ++m) {
        const int32_t e = local_experts_.ids[m];
        if (h.first_slot[e] < 0 || h.home_quota[e] == 0 || s_.spread[e] == mark) continue;
        s_.spread[e] = mark;
        for (int32_t to = h.first_slot[e]; to >= 0; to = h.next_slot[to])
          if (reach(rank_of(to), ~e, to)) return true;
      }
      for (int32_t given = from * slots; given < (from + 1) * slots; ++given) {
        if (h.slot_quota[given] == 0) continue;
        const int32_t e = h.slot_expert[given];
        if (s_.spread[e] == mark) continue;
        s_.spread[e] = mark;
        if (reach(t_.home[e], given, ~e)) return true;
        for (int32_t to = h.first_slot[e]; to >= 0; to = h.next_slot[to])
          if (to != given && reach(rank_of(to), given, to)) return true;
      }
    }
    count_ = count;
    num_levels_ = 1;  // one after the other is any order that levels have
    s_.level[0] = 1;
    s_.level[1] = count;
    return false;
  }

  // The same by a team, one level after the other: each member looks at some of a level's
  // instances, and each expert's holders take the first offer. All is in the order in which one
  // member comes: by place in the queue, then instance, then home and list of holders.
  template <class Members>
  UEC_HD_NOINLINE bool search(Members team, const Assignment& h, int32_t start, bool skip_stuck) {
    const int32_t mark = ++search_;
    for (int32_t r = team.index(); r < t_.num_ranks; r += team.size()) s_.claim[r] = kUnclaimed;
    for (int32_t e = team.index(); e < t_.num_experts; e += team.size()) s_.offer[e] = kUnclaimed;
    if (team.leader()) {
      s_.seen[start] = mark;
      s_.queue[0] = start;
    }
    team.sync();
    int32_t begin = 0, end = 1;
    for (num_levels_ = 0; begin < end; ++num_levels_) {
      make_offers(h, begin, end);
      team.sync();
      const int32_t num_fresh = take_offers(h, skip_stuck);
      for (int32_t i = team.index(); i < num_fresh; i += team.size()) {
        int32_t place = end;
        UEC_UNROLLED_BY_4
        for (int32_t j = 0; j < num_fresh; ++j) place += s_.fresh[j] < s_.fresh[i];
        enqueue(h, s_.arrived[i], static_cast<uint32_t>(s_.fresh[i] >> 32), place);
      }
      if (team.leader()) {
        s_.level[num_levels_] = end;
        s_.level[num_levels_ + 1] = end + num_fresh;
      }
      team.sync();
      begin = end;
      end += num_fresh;
      const auto has_room = [&](int32_t i) { return h.tokens[s_.queue[i]] < threshold_; };
      for (int32_t i = begin - 1; (i = find_first(team, i + 1, end, has_room)) < end;) {
        bool continues = false;
        if (team.leader()) continues = hand_on(h, start, s_.queue[i]);
        if (!team.broadcast(continues)) return true;
      }
    }
    count_ = end;
    return false;
  }

  // An instance of a rank: its local experts, then its slots.
  struct Giver {
    int32_t instance;  // as FlowScratch::given
    int32_t expert;    // -1: there is no such instance
  };
  UEC_HD Giver giver(const Assignment& h, int32_t rank, int32_t index) const {
    const int32_t begin = local_experts_.begin[rank],
                  count = local_experts_.begin[rank + 1] - begin;
    Giver found{0, -1};
    if (index < count) {
      found.expert = local_experts_.ids[begin + index];
      found.instance = ~found.expert;
    } else if (index < count + slots()) {
      found.instance = rank * slots() + index - count;
      found.expert = h.slot_expert[found.instance];
    }
    return found;
  }

  // Makes the offers of a level, places begin .. end - 1 in the queue.
  UEC_HD void make_offers(const Assignment& h, int32_t begin, int32_t end) const {
    for (Cells at = instances_; begin + at.row < end; at.next()) {
      const int32_t place = begin + at.row;
      const Giver from = giver(h, s_.queue[place], at.column);
      if (from.expert < 0 || quota(h, from.instance) == 0) continue;
      const uint32_t offer = static_cast<uint32_t>(place) << width_bits_ | at.column;
      team_.atomic_min(s_.offer + from.expert, offer);
      if (from.instance >= 0) team_.atomic_min(s_.claim + t_.home[from.expert], offer);
    }
  }
  // Returns how many ranks that were not reached before are now.
  UEC_HD int32_t take_offers(const Assignment& h, bool skip_stuck) const {
    int32_t num_fresh = 0;
    for (int32_t first = 0; first < t_.num_ranks; first += team_.size()) {
      const int32_t r = first + team_.index();
      uint32_t claim = kUnclaimed, order = 0;  // home goes first
      if (r < t_.num_ranks && s_.seen[r] != search_ && !(skip_stuck && s_.is_stuck[r] != 0)) {
        claim = s_.claim[r];
        int32_t taken = -1;
        for (int32_t slot = r * slots(); slot < (r + 1) * slots(); ++slot) {
          const int32_t e = h.slot_expert[slot];
          if (e < 0 || s_.offer[e] >= claim) continue;
          claim = s_.offer[e];
          taken = slot;
        }
        if (taken >= 0) order = static_cast<uint32_t>(h.order[taken]) ^ 1u << 31;
        s_.taken[r] = taken;
      }
      const MemberCount fresh = team_.count(claim != kUnclaimed);
      if (claim != kUnclaimed) {
        s_.arrived[num_fresh + fresh.before] = r;
        s_.fresh[num_fresh + fresh.before] = uint64_t{claim} << 32 | order;
      }
      num_fresh += fresh.all;
    }
    team_.sync();
    return num_fresh;
  }
  // By one member.
  UEC_HD void enqueue(const Assignment& h, int32_t rank, uint32_t claim, int32_t place) const {
    const int32_t before = s_.queue[claim >> width_bits_];
    const Giver from = giver(h, before, static_cast<int32_t>(claim & ((1u << width_bits_) - 1)));
    s_.queue[place] = rank;
    s_.seen[rank] = search_;
    s_.before[rank] = before;
    s_.given[rank] = from.instance;
    if (s_.taken[rank] < 0) s_.taken[rank] = ~from.expert;
  }

  const Team team_{};
  const Topology& t_;
  const LocalExperts local_experts_;
  const FlowScratch s_;
  // The bits of an instance's index in an offer; the queue place has the rest. Groups for which 32
  // bits do not suffice are too large for a block's shared memory.
  const int32_t width_bits_;
  const Cells instances_;  // rank by rank
  int64_t threshold_ = 0;
  int32_t search_ = 0, count_ = 0, num_levels_ = 0;
  int32_t stuck_ = -1;  // the rank of the last search, if that failed and nothing has changed
};

}  // namespace uec
