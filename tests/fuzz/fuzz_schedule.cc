// Any plan, tiles and mode: illegal plans are found; of legal ones every byte of every replica is
// written once, by holders, on the boundaries of flag groups, and no wait goes round in a circle.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "core/schedule/cost.hpp"
#include "core/schedule/worklist.hpp"
#include "fuzz/bytes.hpp"
#include "fuzz/checks.hpp"
#include "support/check.hpp"
#include "support/worklist_checks.hpp"

namespace {

using uec::Mode;
using uec::Source;

// The schedule has the plan's replicas, by expert, domain and rank, and shares all groups out to
// hubs.
void check_schedule(const PlanCase& c, const uec::TileMap& tiles, const ScheduleArrays& arrays) {
  const uec::Schedule& s = arrays.schedule;
  std::map<std::pair<int32_t, int32_t>, std::vector<std::pair<int32_t, int32_t>>> replicas;
  std::vector<int64_t> exports(c.num_ranks, 0), imports(c.num_ranks, 0);
  for (int32_t i = 0; i < c.num_ranks * c.slots_per_rank; ++i) {
    if (c.slot_expert[i] < 0) continue;
    const int32_t rank = i / c.slots_per_rank, domain = c.allow_cross_domain ? c.domain[rank] : 0;
    replicas[{c.slot_expert[i], domain}].push_back({rank, i % c.slots_per_rank});
    ++imports[rank];
  }
  CHECK_EQ(s.num_experts, replicas.size());
  int32_t x = 0, at = 0;
  size_t fan_out = 0;
  int64_t least = 0, sent = 0;
  bool relays = false;
  for (const auto& [entry, slots] : replicas) {
    const auto [expert, domain] = entry;
    CHECK_EQ(s.expert[x], expert);
    CHECK_EQ(s.first[x], at);
    const auto n = static_cast<int32_t>(slots.size());
    CHECK_EQ(s.num_replicas(x), n);
    for (const auto& [rank, slot] : slots) {
      CHECK_EQ(s.replica_rank[at], rank);
      CHECK_EQ(s.replica_slot[at], slot);
      ++at;
    }
    const int32_t* const bounds = s.boundaries(x);
    CHECK_EQ(bounds[0], 0);
    for (int32_t hub = 0; hub <= n; ++hub) CHECK(bounds[hub] <= bounds[hub + 1]);
    CHECK_EQ(bounds[n + 1], tiles.num_groups());
    const bool foreign = c.allow_cross_domain && c.domain[c.home[expert]] != domain;
    if (n == 1 || s.mode == Mode::kDirect)
      CHECK_EQ(bounds[1], bounds[n + 1]);
    else if (foreign)
      CHECK_EQ(bounds[1], 0);  // each group crosses once
    relays |= foreign && n > 1;
    ++exports[c.home[expert]];
    fan_out = std::max(fan_out, slots.size());
    ++x;
  }
  CHECK_EQ(s.first[x], at);
  CHECK_EQ(arrays.shape.num_replicas, at);
  CHECK_EQ(arrays.shape.max_fanout, fan_out);
  CHECK_EQ(arrays.shape.relays, relays);
  bool chained = false;
  for (int32_t r = 0; r < c.num_ranks; ++r) {
    chained |= exports[r] > 0 && imports[r] > 0;
    least = std::max(least, exports[r]);
    sent += s.egress[r];
    CHECK(s.egress[r] >= exports[r] * uec::kEgressUnit);  // each expert leaves its home once
  }
  CHECK_EQ(sent, at * uec::kEgressUnit);  // each slot is filled once
  CHECK_EQ(arrays.shape.chained, chained);
  CHECK_EQ(arrays.shape.max_exports, least);
  CHECK_EQ(arrays.shape.max_imports, *std::max_element(imports.begin(), imports.end()));
}

using Slot = std::pair<int32_t, int32_t>;

// How often each byte of a slot is written: [segment][byte], for segments of a few bytes, else by
// tile.
class Coverage {
 public:
  explicit Coverage(const uec::TileMap& tiles) : tiles_(tiles), count_(tiles.num_tiles(), 0) {}

  void add_group(int64_t group) {
    const int64_t group_tiles = tiles_.group_tiles;
    const int64_t first = group * group_tiles;
    CHECK(group >= 0 && first < tiles_.num_tiles());
    for (int64_t i = first; i < std::min(first + group_tiles, tiles_.num_tiles()); ++i) ++count_[i];
  }

  // All tiles once; and tiles are the segments' bytes, in their order and without gaps.
  void check() const {
    for (const int32_t count : count_) CHECK_EQ(count, 1);
    int64_t tile = 0;
    for (int32_t i = 0; i < tiles_.num_segments; ++i) {
      for (int64_t offset = 0; offset < tiles_.bytes[i]; ++tile) {
        const uec::TileSpan span = tiles_.span(tile);
        CHECK_EQ(span.segment, tiles_.segment[i]);
        CHECK_EQ(span.offset, offset);
        CHECK(span.bytes > 0 && span.bytes <= tiles_.tile_bytes);
        offset += span.bytes;
        CHECK(offset <= tiles_.bytes[i]);
      }
    }
    CHECK_EQ(tile, tiles_.num_tiles());
  }

 private:
  const uec::TileMap& tiles_;
  std::vector<int32_t> count_;
};

// Runs the pieces of all ranks as their inputs become ready, in the worst order for waiting pieces:
// those of one rank at a time, until nothing moves. All have to run, and every flag that is waited
// for has to have been published by then.
void check_progress(const std::vector<WorklistArrays>& ranks, const uec::TileMap& tiles,
                    const PlanCase& c) {
  std::map<Slot, Coverage> coverage;
  for (int32_t i = 0; i < c.num_ranks * c.slots_per_rank; ++i)
    if (c.slot_expert[i] >= 0)
      coverage.try_emplace({i / c.slots_per_rank, i % c.slots_per_rank}, tiles);
  using Flag =
      std::tuple<int32_t, int32_t, int32_t, int32_t>;     // kind, waiter, slot or main, sender
  std::set<std::tuple<int32_t, int32_t, int32_t>> ready;  // rank, slot, group
  std::set<Flag> published;
  std::vector<std::vector<int32_t>> reached, left;
  for (const WorklistArrays& w : ranks) {
    reached.emplace_back();
    for (int32_t p = 0; p < w.list.num_pieces; ++p)
      reached.back().push_back(w.list.pieces[p].begin);
    left.emplace_back();
    for (int32_t i = 0; i < w.list.num_tasks; ++i)
      left.back().push_back(w.list.tasks[i].num_groups);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (auto r = static_cast<int32_t>(ranks.size()) - 1; r >= 0; --r) {
      const uec::Worklist& w = ranks[r].list;
      for (int32_t p = w.num_pieces - 1; p >= 0; --p) {
        const uec::Piece& piece = w.pieces[p];
        const uec::Task& task = w.tasks[piece.task];
        for (int32_t& g = reached[r][p]; g < piece.end; ++g) {
          if (piece.source == Source::kSlot && !ready.contains({r, ~piece.source_idx, g})) break;
          moved = true;
          --left[r][piece.task];
          for (int32_t d = piece.dst_first; d < piece.dst_first + piece.dst_count; ++d) {
            const auto [rank, slot] = w.destinations[d];
            coverage.at({rank, slot}).add_group(g);
            if (piece.sets_ready) ready.insert({rank, slot, g});
          }
        }
        if (left[r][piece.task] != 0) continue;
        for (int32_t d = task.done_first; d < task.done_first + task.done_count; ++d)
          published.insert(
              {uec::Expected::kDone, w.destinations[d].rank, w.destinations[d].slot, r});
        if (task.pulled_rank >= 0)
          published.insert({uec::Expected::kPulled, task.pulled_rank, task.pulled_idx, r});
      }
    }
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    const uec::Worklist& w = ranks[r].list;
    for (int32_t p = 0; p < w.num_pieces; ++p) CHECK_EQ(reached[r][p], w.pieces[p].end);
    for (const int32_t groups : left[r]) CHECK_EQ(groups, 0);
    for (int32_t i = 0; i < w.num_expected; ++i) {
      const uec::Expected& e = w.expected[i];
      CHECK(published.contains({e.kind, static_cast<int32_t>(r), e.idx, e.peer}));
    }
  }
  for (const auto& [slot, written] : coverage) written.check();
}

uec::CostModel draw_cost(fuzz::Bytes& bytes) {
  return {.store_per_kib = bytes.draw(0, 1 << 20),
          .load_per_kib = bytes.draw(0, 1 << 20),
          .group = bytes.draw(0, 1 << 24),
          .hop = bytes.draw(0, 1 << 24),
          .parallel_percent = bytes.draw(0, 1 << 16)};
}

// What "auto" has chosen is what is asked for by name, and what may be chosen.
Mode choose_mode(const PlanCase& c, const uec::TileMap& tiles, bool may_pull,
                 const uec::CostModel& cost) {
  ScheduleArrays a(c, tiles, Mode::kDirect);
  const uec::ScheduleScratch scratch{a.count.data(), a.exports.data(), a.order.data(),
                                     a.extra.data()};
  uec::make_schedule(uec::SingleThread{}, c.topology(), tiles, c.slot_expert.data(), c.residents(),
                     -1, may_pull, cost, scratch, &a.shape, a.schedule);
  const Mode mode = a.schedule.mode;
  CHECK(mode == (may_pull ? Mode::kPull : Mode::kPush) ||
        (mode == Mode::kDirect && !a.shape.relays));
  const ScheduleArrays named(c, tiles, mode);
  CHECK(a.boundary == named.boundary && a.egress == named.egress);
  check_schedule(c, tiles, a);
  return mode;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  const uint8_t kind = bytes.next();
  PlanCase c =
      (kind & 7) == 7 ? fuzz::draw_group(bytes, 40, 64, 3) : fuzz::draw_group(bytes, 9, 20, 4);
  const int64_t tile_bytes = int64_t{1} << bytes.draw(4, 17);
  const Tiles tiles(fuzz::draw_segments(bytes, tile_bytes), tile_bytes);
  const auto choice = bytes.small(0, uec::kNumModes);
  const bool may_pull = bytes.flag();
  const uec::CostModel cost = choice == uec::kNumModes ? draw_cost(bytes) : uec::CostModel{};
  fuzz::draw_slots(bytes, c, (kind & 8) == 0);
  if (fuzz::check_validate(c) != uec::PlanFault::kNone) return 0;

  const Mode mode = choice == uec::kNumModes ? choose_mode(c, tiles.map(), may_pull, cost)
                                             : static_cast<Mode>(choice);
  const ScheduleArrays arrays(c, tiles.map(), mode);
  check_schedule(c, tiles.map(), arrays);
  worklist_checks::check_all(c, tiles.map(), arrays.schedule);
  std::vector<WorklistArrays> ranks;
  ranks.reserve(c.num_ranks);
  for (int32_t r = 0; r < c.num_ranks; ++r) ranks.emplace_back(c, arrays.schedule, r);
  check_progress(ranks, tiles.map(), c);
  return 0;
}
