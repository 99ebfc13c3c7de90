// The work of a rank when whole experts are relayed along trees, as other libraries do: what hubs
// are compared to. The core's workers run it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/schedule/schedule.hpp"
#include "core/schedule/worklist.hpp"

namespace uec::model {

// `parent` [R]: who sends to each replica of the schedule, in its order: the expert's home, or a
// replica of it that the home sends to. A relay passes each of `groups` chunks on as soon as it
// has arrived. Fills the worklist's arrays, whose capacities are those of any plan.
inline void build_relays(const Topology& t, const Schedule& s, const std::vector<int32_t>& parent,
                         int32_t groups, const int32_t* local_idx, int32_t rank, Worklist& w) {
  detail::note_involved(SingleThread{}, t, s, w);
  w.num_tasks = w.num_pieces = w.num_destinations = w.num_expected = w.num_reductions = 0;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t first = s.first[x], end = s.first[x + 1], home = s.source[x].rank;
    const auto has_children = [&](int32_t i) {
      for (int32_t j = first; j < end; ++j)
        if (j != i && parent[j] == s.replica_rank[i]) return true;
      return false;
    };
    int32_t self = -1;
    for (int32_t i = first; i < end; ++i)
      if (s.replica_rank[i] == rank) self = i;
    if (self >= 0) {
      w.expected[w.num_expected++] = {Expected::kDone, parent[self], s.expert[x],
                                      s.replica_slot[self]};
      w.opens[parent[self]] = 1;
    }
    if (self < 0 && home != rank) continue;
    const int32_t dst_first = w.num_destinations, task = w.num_tasks, pieces = w.num_pieces;
    const auto add = [&](int32_t i) {
      w.destinations[w.num_destinations++] = {s.replica_rank[i], s.replica_slot[i]};
      w.needs[s.replica_rank[i]] = 1;
    };
    if (home == rank) {  // relays first, a piece for each; then all others together
      for (int32_t i = first; i < end; ++i) {
        if (parent[i] != rank || !has_children(i)) continue;
        w.pieces[w.num_pieces++] = {
            task, 0,   groups, Source::kHeld, rank, local_idx[s.expert[x]], w.num_destinations,
            1,    true};
        add(i);
      }
    }
    const int32_t leaves = w.num_destinations;
    for (int32_t i = first; i < end; ++i)
      if (i != self && parent[i] == rank && !(home == rank && has_children(i))) add(i);
    const int32_t num_leaves = w.num_destinations - leaves;
    if (num_leaves > 0) {
      const bool is_home = home == rank;
      w.pieces[w.num_pieces++] = {task,   0,
                                  groups, is_home ? Source::kHeld : Source::kSlot,
                                  home,   is_home ? local_idx[s.expert[x]] : ~s.replica_slot[self],
                                  leaves, num_leaves,
                                  false};
    }
    if (w.num_pieces > pieces)
      w.tasks[w.num_tasks++] = {s.expert[x], groups * (w.num_pieces - pieces),
                                dst_first,   w.num_destinations - dst_first,
                                -1,          -1};
  }
}

}  // namespace uec::model
