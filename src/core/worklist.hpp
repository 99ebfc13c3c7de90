// Schedule -> what one rank does: pieces to stream, senders to expect, ranks to open for.
#pragma once

#include "core/common.hpp"
#include "core/schedule.hpp"
#include "core/tiles.hpp"

namespace uec {

enum class Source : int32_t {
  kMain,        // this rank's main weights
  kSlot,        // this rank's slot, as its tiles become ready (a hub in push)
  kRemoteMain,  // the home's main weights, by remote load (a hub in pull)
};

struct Destination {
  int32_t rank;
  int32_t slot;
};

// Everything this rank sends of one expert. When the last of its groups has been delivered,
// `done` is published to each destination in [done_first, done_first + done_count).
struct Task {
  int32_t expert;
  int32_t num_groups;   // over all pieces
  int32_t group_tiles;  // tiles per flag group
  int32_t done_first;   // into destinations
  int32_t done_count;
  int32_t pulled_home;  // pull hub: the rank to tell that its weights were read, else -1
  int32_t pulled_main;  // and the expert's index among that rank's mains
};

// A run of groups of one task with one source and one set of destinations.
struct Piece {
  int32_t task;
  int32_t begin, end;  // groups
  Source source;
  int32_t source_rank;  // kRemoteMain: the home. kSlot: the home too, whose flags we wait for
  int32_t source_idx;   // main index or slot
  int32_t dst_first;    // into destinations
  int32_t dst_count;
  bool sets_ready;  // push, home -> hub: flag each group at the hub
};

// A flag this rank waits for before its call is finished.
struct Expected {
  enum Kind : int32_t { kDone, kPulled } kind;
  int32_t peer;
  int32_t expert;
  int32_t idx;  // slot or main index
};

// Capacities, with R replicas in the plan and M mains on this rank: tasks M + S, pieces M + R + S,
// destinations and expected R + S * G.
struct Worklist {
  int32_t num_tasks = 0, num_pieces = 0, num_destinations = 0, num_expected = 0;
  Task* tasks = nullptr;
  Piece* pieces = nullptr;
  Destination* destinations = nullptr;
  Expected* expected = nullptr;
  uint8_t* opens = nullptr;     // [G] 1: may write our slots or read our mains in this call
  uint8_t* involved = nullptr;  // [G] 1: sends or receives something under the plan
  uint8_t* needs = nullptr;     // [G] 1: has to open for us: we write its slots or read its mains
};

namespace detail {

struct WorklistBuilder {
  const Topology& t;
  const TileMap& tiles;
  const Schedule& s;
  int32_t rank;
  Worklist& w;

  UEC_HD int32_t add_destination(int32_t i) const {
    w.destinations[w.num_destinations] = {s.replica_rank[i], s.replica_slot[i]};
    if (s.replica_rank[i] != rank) w.needs[s.replica_rank[i]] = 1;
    return w.num_destinations++;
  }

  // All replicas of x but the one at index `skip`.
  UEC_HD void add_destinations(int32_t x, int32_t skip) const {
    for (int32_t i = s.first[x]; i < s.first[x + 1]; ++i)
      if (i != skip) add_destination(i);
  }

  UEC_HD void expect(Expected::Kind kind, int32_t peer, int32_t expert, int32_t idx) const {
    w.expected[w.num_expected++] = {kind, peer, expert, idx};
    w.opens[peer] = 1;
  }

  UEC_HD Task& begin_task(int32_t x, int32_t num_groups) const {
    const int32_t n = s.num_replicas(x);
    Task& task = w.tasks[w.num_tasks++];
    task = {s.expert[x],
            num_groups,
            static_cast<int32_t>(TileMap::tiles_per_group(tiles.tile_bytes, n)),
            w.num_destinations,
            0,
            -1,
            -1};
    return task;
  }

  UEC_HD void add_piece(int32_t begin, int32_t end, Source source, int32_t source_rank,
                        int32_t source_idx, int32_t dst_first, int32_t dst_count,
                        bool sets_ready) const {
    w.pieces[w.num_pieces++] = {w.num_tasks - 1, begin,     end,       source,    source_rank,
                                source_idx,      dst_first, dst_count, sets_ready};
  }

  UEC_HD void add_home(int32_t x, int32_t main_idx) const {
    const int32_t* bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x), home = t.home[s.expert[x]];
    const bool to_all = bounds[1] > bounds[0];
    if (s.mode == Mode::kPull) {
      for (int32_t hub = 1; hub <= n; ++hub)
        if (bounds[hub + 1] > bounds[hub])
          expect(Expected::kPulled, s.replica_rank[s.first[x] + hub - 1], s.expert[x], main_idx);
      if (!to_all) return;
    }
    const bool pushes = s.mode == Mode::kPush;
    Task& task = begin_task(x, pushes ? bounds[n + 1] : bounds[1] - bounds[0]);
    const int32_t all = w.num_destinations;
    if (to_all) add_destinations(x, -1);
    if (pushes) {  // ahead of the home's own range: at equal progress, hubs are fed first
      for (int32_t hub = 1; hub <= n; ++hub) {
        if (bounds[hub + 1] == bounds[hub]) continue;
        const int32_t to = to_all ? all + hub - 1 : add_destination(s.first[x] + hub - 1);
        add_piece(bounds[hub], bounds[hub + 1], Source::kMain, home, main_idx, to, 1, true);
      }
    }
    if (to_all) add_piece(bounds[0], bounds[1], Source::kMain, home, main_idx, all, n, false);
    // Written to: everybody if the home is a hub itself, else the hubs.
    task.done_first = all;
    task.done_count = w.num_destinations - all;
  }

  UEC_HD void add_replica(int32_t x, int32_t self, int32_t main_idx) const {
    const int32_t* bounds = s.boundaries(x);
    const int32_t n = s.num_replicas(x), expert = s.expert[x], home = t.home[expert];
    const int32_t own = self - s.first[x] + 1, slot = s.replica_slot[self];
    const bool is_hub = bounds[own + 1] > bounds[own];
    if (bounds[1] > bounds[0] || (s.mode == Mode::kPush && is_hub))
      expect(Expected::kDone, home, expert, slot);
    for (int32_t hub = 1; hub <= n; ++hub)
      if (hub != own && bounds[hub + 1] > bounds[hub])
        expect(Expected::kDone, s.replica_rank[s.first[x] + hub - 1], expert, slot);
    if (!is_hub) return;

    Task& task = begin_task(x, bounds[own + 1] - bounds[own]);
    task.done_first = w.num_destinations;
    add_destinations(x, self);
    task.done_count = n - 1;
    if (s.mode == Mode::kPull) {
      task.pulled_home = home;
      w.needs[home] = 1;
      task.pulled_main = main_idx;
      add_destination(self);  // behind the others: `done` goes to other ranks only
      add_piece(bounds[own], bounds[own + 1], Source::kRemoteMain, home, main_idx, task.done_first,
                n, false);
    } else {
      add_piece(bounds[own], bounds[own + 1], Source::kSlot, home, slot, task.done_first, n - 1,
                false);
    }
  }
};

}  // namespace detail

// `main_idx` [E]: index of each expert among its home's mains.
UEC_HD inline void build_worklist(const Topology& t, const TileMap& tiles, const Schedule& s,
                                  const int32_t* main_idx, int32_t rank, Worklist& w) {
  w.num_tasks = w.num_pieces = w.num_destinations = w.num_expected = 0;
  for (int32_t r = 0; r < t.num_ranks; ++r) w.opens[r] = w.involved[r] = w.needs[r] = 0;
  const detail::WorklistBuilder build{t, tiles, s, rank, w};
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t expert = s.expert[x];
    w.involved[t.home[expert]] = 1;
    if (t.home[expert] == rank) build.add_home(x, main_idx[expert]);
    for (int32_t i = s.first[x]; i < s.first[x + 1]; ++i) {
      w.involved[s.replica_rank[i]] = 1;
      if (s.replica_rank[i] == rank) build.add_replica(x, i, main_idx[expert]);
    }
  }
}

}  // namespace uec
