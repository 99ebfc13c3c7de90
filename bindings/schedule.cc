#include "core/schedule/schedule.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "arrays.hpp"
#include "bind.hpp"
#include "core/plan/check.hpp"
#include "core/schedule/cost.hpp"
#include "modes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace uec::python {
namespace {

using Ints = std::vector<int32_t>;

// The core assumes legal plans and sizes in range.
void check_ranges(const Topology& t, const Ints& slot_expert,
                  const std::vector<int64_t>& segment_bytes, int64_t tile_bytes,
                  const std::vector<int64_t>& cost) {
  if (t.num_ranks < 1) reject("length of domain", t.num_ranks, "at least 1 rank");
  if (t.slots_per_rank < 0) reject("slots_per_rank", t.slots_per_rank, "0 or more");
  require_homes(t);
  require_equal("length of slot_expert", slot_expert.size(),
                int64_t{t.num_ranks} * t.slots_per_rank);
  if (check_plan(SingleThread{}, t, slot_expert.data()).fault != PlanFault::kNone)
    throw nb::value_error("the plan is not legal on this topology");
  constexpr int64_t kMaxTile = 1 << 30;
  if (tile_bytes < 1 || tile_bytes > kMaxTile)
    reject("tile_bytes", tile_bytes, "1 to " + std::to_string(kMaxTile));
  int64_t num_tiles = 0;
  for (const int64_t bytes : segment_bytes) {
    if (bytes < 0) reject("segment_bytes", bytes, "0 or more");
    num_tiles += bytes / tile_bytes + 1;
    if (num_tiles > INT32_MAX) reject("number of tiles", num_tiles, "below 2**31");
  }
  require_equal("length of cost", cost.size(), 5);
  for (const int64_t constant : cost)
    if (constant < 0) reject("cost", constant, "0 or more");
  if (cost[4] < 1) reject("cost[4], parallel_percent,", cost[4], "at least 1");
}

// Returns the schedule of a plan as plain lists, for tests and models. Engines make their own.
using Fields = nb::typed<nb::dict, nb::str, nb::any>;

Fields make(const Ints& slot_expert, const Ints& home, const Ints& domain, int32_t slots_per_rank,
            bool allow_cross_domain, const std::vector<int64_t>& segment_bytes, int64_t tile_bytes,
            GivenMode mode, bool may_pull, const std::vector<int64_t>& cost,
            const std::optional<Ints>& resident) {
  const Topology t{static_cast<int32_t>(domain.size()),
                   static_cast<int32_t>(home.size()),
                   slots_per_rank,
                   home.data(),
                   domain.data(),
                   allow_cross_domain};
  check_ranges(t, slot_expert, segment_bytes, tile_bytes, cost);
  if (resident) require_equal("length of resident", resident->size(), slot_expert.size());

  const size_t replicas = slot_expert.size(), ranks = domain.size(), experts = home.size();
  Ints expert(replicas + 1), first(replicas + 2), rank(replicas + 1), slot(replicas + 1),
      boundary(3 * replicas + 2), count(std::max(experts, replicas) + 1), exports(ranks),
      order(replicas + 1);
  std::vector<Sender> source(replicas + 1);
  std::vector<int64_t> egress(ranks), extra(2 * replicas + 2);
  Schedule s{.expert = expert.data(),
             .first = first.data(),
             .replica_rank = rank.data(),
             .replica_slot = slot.data(),
             .boundary = boundary.data(),
             .egress = egress.data(),
             .source = source.data()};
  const ScheduleScratch scratch{count.data(), exports.data(), order.data(), extra.data()};

  Ints segment(segment_bytes.size());
  std::iota(segment.begin(), segment.end(), 0);
  std::vector<int64_t> first_tile(1);
  for (const int64_t bytes : segment_bytes)
    first_tile.push_back(first_tile.back() + ceil_div(bytes, tile_bytes));
  const TileMap tiles{static_cast<int32_t>(segment.size()),
                      segment.data(),
                      segment_bytes.data(),
                      first_tile.data(),
                      tile_bytes,
                      TileMap::tiles_per_group(tile_bytes)};

  PlanShape shape;
  const CostModel model{cost[0], cost[1], cost[2], cost[3], cost[4]};
  make_schedule(SingleThread{}, t, tiles, slot_expert.data(), resident ? resident->data() : nullptr,
                number_of(mode), may_pull, model, scratch, &shape, s);
  const int32_t total = s.first[s.num_experts];
  Fields d;
  d["mode"] = s.mode;
  d["expert"] = Ints(expert.begin(), expert.begin() + s.num_experts);
  d["first"] = Ints(first.begin(), first.begin() + s.num_experts + 1);
  d["replica_rank"] = Ints(rank.begin(), rank.begin() + total);
  d["replica_slot"] = Ints(slot.begin(), slot.begin() + total);
  d["boundary"] = Ints(boundary.begin(), boundary.begin() + total + 2 * s.num_experts);
  d["egress"] = egress;
  Ints source_rank, source_slot;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    source_rank.push_back(source[x].rank);
    source_slot.push_back(source[x].slot);
  }
  d["source_rank"] = source_rank;
  d["source_slot"] = source_slot;
  d["max_exports"] = shape.max_exports;
  d["max_imports"] = shape.max_imports;
  d["chained"] = shape.chained;
  d["modelled_ps"] = modelled_time(SingleThread{}, t, tiles, tiles.num_groups(), shape, s, model);
  return d;
}

}  // namespace

void bind_schedule(nb::module_& m) {
  m.def("make_schedule", &make, "slot_expert"_a, "home"_a, "domain"_a, "slots_per_rank"_a,
        "allow_cross_domain"_a, "segment_bytes"_a, "tile_bytes"_a, "mode"_a.none(), "may_pull"_a,
        "cost"_a, "resident"_a = nb::none(),
        "Returns a legal plan's schedule; `cost` is CostModel by field.");
}

}  // namespace uec::python
