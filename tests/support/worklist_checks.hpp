// All ranks' worklists together: every group of every filled slot is written exactly once, from
// bytes that are there, and every flag that is waited for has exactly one publisher.
#pragma once

#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "core/schedule/worklist.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/worklists.hpp"

namespace worklist_checks {

using uec::Expected;
using uec::Mode;
using uec::Source;

using Flag = std::tuple<int32_t, int32_t, int32_t, int32_t>;  // kind, waiter, slot or main, sender
using Slot = std::pair<int32_t, int32_t>;

struct Sums {
  std::map<Slot, std::vector<int32_t>> writes;   // per group
  std::map<Slot, std::vector<int32_t>> ready;    // per group: flags set at a hub
  std::map<Slot, std::vector<int32_t>> awaited;  // per group: flags that a hub waits for
  std::set<Flag> published, expected;
  std::set<std::pair<int32_t, int32_t>> touches;  // (owner of memory, who writes or reads it)
  std::vector<bool> involved;
  std::map<Slot, Slot> sources;  // of filled slots: rank and slot
  std::map<Slot, int32_t> held;  // (expert, source's rank) -> the source's slot
};

inline void add_rank(const PlanCase& c, Mode mode, int32_t rank, const uec::Worklist& w,
                     Sums& sums) {
  const std::vector<int32_t> local_idx = c.local_idx();
  const auto slot_expert = [&c](int32_t r, int32_t i) {
    return c.slot_expert[r * c.slots_per_rank + i];
  };
  std::vector<int32_t> groups(w.num_tasks, 0);
  std::vector<std::set<Slot>> written(w.num_tasks);
  for (int32_t p = 0; p < w.num_pieces; ++p) {
    const uec::Piece& piece = w.pieces[p];
    CHECK(piece.task >= 0 && piece.task < w.num_tasks);
    const uec::Task& task = w.tasks[piece.task];
    CHECK(piece.begin < piece.end && piece.dst_count > 0);
    CHECK(piece.dst_first >= 0 && piece.dst_first + piece.dst_count <= w.num_destinations);
    groups[piece.task] += piece.end - piece.begin;
    const uec::Destination& first = w.destinations[piece.dst_first];
    const auto [source, held] = sums.sources.at({first.rank, first.slot});
    CHECK_EQ(piece.source_rank, source);
    if (piece.source == Source::kHeld) CHECK_EQ(rank, source);
    if (piece.source == Source::kSlot) {
      CHECK(mode == Mode::kPush);
      const int32_t slot = ~piece.source_idx;
      CHECK_EQ(slot_expert(rank, slot), task.expert);
      auto& awaited = sums.awaited[{rank, slot}];
      for (int32_t g = piece.begin; g < piece.end; ++g) ++awaited[g];
    } else {
      CHECK_EQ(piece.source_idx, uec::source_idx(held, local_idx[task.expert]));
    }
    if (piece.source == Source::kRemote) {
      CHECK(mode == Mode::kPull && rank != source);
      sums.touches.insert({source, rank});
    }
    if (piece.sets_ready) CHECK(mode == Mode::kPush && piece.dst_count == 1 && rank == source);
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const auto [to, slot] = w.destinations[piece.dst_first + i];
      CHECK_EQ(slot_expert(to, slot), task.expert);
      CHECK(sums.sources.at({to, slot}) == Slot(source, held));
      for (int32_t g = piece.begin; g < piece.end; ++g) {
        ++sums.writes[{to, slot}][g];
        if (piece.sets_ready) ++sums.ready[{to, slot}][g];
      }
      if (to == rank) continue;
      written[piece.task].insert({to, slot});
      sums.touches.insert({to, rank});
    }
  }
  for (int32_t i = 0; i < w.num_tasks; ++i) {
    const uec::Task& task = w.tasks[i];
    CHECK_EQ(task.num_groups, groups[i]);
    const uec::Destination* done = w.destinations + task.done_first;
    for (int32_t d = 0; d < task.done_count; ++d) {
      CHECK(written[i].erase({done[d].rank, done[d].slot}) ==
            1);  // each rank written to gets a flag
      CHECK(sums.published.insert({Expected::kDone, done[d].rank, done[d].slot, rank}).second);
    }
    CHECK(written[i].empty());
    if (task.pulled_rank < 0) continue;
    CHECK_EQ(task.pulled_rank, sums.sources.at({done[0].rank, done[0].slot}).first);
    CHECK(
        sums.published.insert({Expected::kPulled, task.pulled_rank, task.pulled_idx, rank}).second);
  }
  for (int32_t i = 0; i < w.num_expected; ++i) {
    const Expected& e = w.expected[i];
    CHECK(sums.expected.insert({e.kind, rank, e.idx, e.peer}).second);
    if (e.kind == Expected::kDone) CHECK_EQ(slot_expert(rank, e.idx), e.expert);
    if (e.kind == Expected::kPulled)
      CHECK_EQ(uec::source_idx(sums.held.at({e.expert, rank}), local_idx[e.expert]), e.idx);
  }
  for (int32_t r = 0; r < c.num_ranks; ++r) CHECK_EQ(w.involved[r], sums.involved[r]);
}

// The worklists of all ranks for a plan and its schedule.
inline void check_all(const PlanCase& c, const uec::TileMap& tiles, const uec::Schedule& s) {
  const Mode mode = s.mode;
  Sums sums;
  sums.involved.assign(c.num_ranks, false);
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const Slot source{s.source[x].rank, s.source[x].slot};
    sums.held[{s.expert[x], source.first}] = source.second;
    sums.involved[s.source[x].rank] = true;
    const int64_t groups = tiles.num_groups();
    for (int32_t i = s.first[x]; i < s.first[x + 1]; ++i) {
      const Slot slot{s.replica_rank[i], s.replica_slot[i]};
      sums.involved[slot.first] = true;
      sums.sources[slot] = source;
      for (auto* counts : {&sums.writes, &sums.ready, &sums.awaited})
        (*counts)[slot].resize(groups);
    }
  }
  std::vector<std::vector<uint8_t>> opens, needs;
  for (int32_t r = 0; r < c.num_ranks; ++r) {
    const WorklistArrays w(c, s, r);
    add_rank(c, mode, r, w.list, sums);
    opens.push_back(w.opens);
    needs.push_back(w.needs);
  }
  CHECK_EQ(sums.writes.size(), c.num_replicas());  // nothing but filled slots
  for (const auto& [owner, toucher] : sums.touches) CHECK(owner != toucher);
  for (const auto& [slot, counts] : sums.writes)
    for (const int32_t count : counts) CHECK_EQ(count, 1);
  CHECK(sums.ready == sums.awaited);
  CHECK(sums.published == sums.expected);
  for (int32_t r = 0; r < c.num_ranks; ++r)
    for (int32_t peer = 0; peer < c.num_ranks; ++peer) {
      CHECK_EQ(opens[r][peer], sums.touches.contains({r, peer}));
      CHECK_EQ(needs[r][peer], sums.touches.contains({peer, r}));  // never ourselves
    }
}

}  // namespace worklist_checks
