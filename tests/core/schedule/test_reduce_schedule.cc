// The schedule of a gradient reduction: every group is added up once, in equal shares, and the
// egress that modes are compared by is what ranks load from others.
#include <algorithm>
#include <vector>

#include "core/reduce_cases.hpp"
#include "support/check.hpp"

namespace {

using uec::kEgressUnit;
using uec::Mode;

constexpr auto kFloat32 = uec::GradType::kFloat32;
constexpr auto kBFloat16 = uec::GradType::kBFloat16;

void check_schedule(const ReduceCase& c, const Given& given) {
  const uec::Schedule& s = given.schedule.schedule;
  CHECK(s.mode == Mode::kPull || s.mode == Mode::kDirect);
  if (c.mode >= 0) CHECK(s.mode == static_cast<Mode>(c.mode));
  std::vector<int64_t> loads(c.plan.num_ranks);
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x), home = c.plan.home[s.expert[x]];
    const int64_t groups = given.call.tiles.num_groups();
    const int32_t* const bounds = s.boundaries(x);
    CHECK_EQ(bounds[0], 0);
    CHECK_EQ(bounds[n + 1], groups);
    for (int32_t hub = 0; hub <= n; ++hub) CHECK(bounds[hub] <= bounds[hub + 1]);
    if (n == 1 || s.mode == Mode::kDirect) {  // the home reads every replica itself
      CHECK_EQ(bounds[1], groups);
      loads[home] += n * kEgressUnit;
      continue;
    }
    CHECK_EQ(bounds[1], 0);
    loads[home] += kEgressUnit;
    for (int32_t hub = 1; hub <= n; ++hub) {
      const int32_t share = bounds[hub + 1] - bounds[hub];
      CHECK(share == groups / n || share == (groups + n - 1) / n);
      loads[s.replica_rank[s.first[x] + hub - 1]] += (n - 1) * kEgressUnit / n;
    }
  }
  for (int32_t r = 0; r < c.plan.num_ranks; ++r) CHECK_EQ(s.egress[r], loads[r]);
}

// Ranks 1 to n have a replica of expert 0.
ReduceCase fan_in(int32_t n, int64_t bytes) {
  PlanCase plan = make_group(n + 1, n + 1, 1);
  for (int32_t r = 1; r <= n; ++r) CHECK(plan.place(0, r));
  ReduceCase c(plan);
  c.add_segment(bytes, kFloat32, kFloat32);
  return c;
}

void check_known() {
  for (const auto& [n, bounds] : std::vector<std::pair<int32_t, std::vector<int32_t>>>{
           {1, {0, 10, 10}}, {2, {0, 0, 5, 10}}, {3, {0, 0, 3, 6, 10}}}) {
    ReduceCase c = fan_in(n, 320 << 10);  // ten groups
    c.mode = static_cast<int32_t>(Mode::kPull);
    Given given(c.capacity(0));
    prepare_reduction(uec::SingleThread{}, c, 0, given);
    for (size_t i = 0; i < bounds.size(); ++i)
      CHECK_EQ(given.schedule.schedule.boundaries(0)[i], bounds[i]);
  }
}

Mode chosen(const ReduceCase& c) {
  Given given(c.capacity(0));
  prepare_reduction(uec::SingleThread{}, c, 0, given);
  return given.schedule.schedule.mode;
}

// A home that would load eight replicas alone shares that work if loads are what takes the time,
// and does not if a hop is, or if all ranks have one core between them.
void check_choice() {
  ReduceCase c = fan_in(8, 16 << 20);
  c.cost = {1'000, 1'000, 0, 1'000'000, 900};
  CHECK(chosen(c) == Mode::kPull);
  c.cost.hop = 1'000'000'000'000;
  CHECK(chosen(c) == Mode::kDirect);
  c.cost.hop = 0;
  c.cost.parallel_percent = 100;
  CHECK(chosen(c) == Mode::kDirect);
  ReduceCase one = fan_in(1, 16 << 20);
  one.cost = {1'000, 1'000, 0, 0, 900};
  CHECK(chosen(one) == Mode::kDirect);
}

// What calls must differ in for their digests to differ.
void check_digest() {
  ReduceCase c = fan_in(3, 640 << 10);
  c.mode = static_cast<int32_t>(Mode::kPull);
  const auto digest = [](const ReduceCase& of, int32_t rank) {
    Given given(of.capacity(rank));
    return prepare_reduction(uec::SingleThread{}, of, rank, given);
  };
  const uint64_t own = digest(c, 0);
  CHECK(own == digest(c, 1));
  ReduceCase other = c;
  other.main_type[0] = kBFloat16;  // a rank's own business
  CHECK(own == digest(other, 0));
  other.zero = false;
  CHECK(own != digest(other, 0));
  other = c;
  other.mode = static_cast<int32_t>(Mode::kDirect);
  CHECK(own != digest(other, 0));
  other = c;
  other.plan.slot_expert[1] = -1;
  CHECK(own != digest(other, 0));
}

// The sums of a hub's range fit into what the layout has for a slot.
void check_sums(const ReduceCase& c, const Given& given) {
  const uec::Schedule& s = given.schedule.schedule;
  const int64_t room = uec::sums_bytes(c.num_tiles(), c.tile_bytes);
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int64_t tiles = uec::TileMap::tiles_per_group(c.tile_bytes), all = c.num_tiles();
    for (int32_t hub = 1; hub <= s.num_replicas(x); ++hub) {
      const int64_t begin = s.boundaries(x)[hub] * tiles;
      const int64_t end = std::min(s.boundaries(x)[hub + 1] * tiles, all);
      CHECK((end - begin) * c.tile_bytes * 2 <= room);
    }
  }
}

}  // namespace

int main() {
  check_known();
  check_choice();
  check_digest();
  Random random(12);
  int chose[uec::kNumModes] = {};
  for (int repeat = 0; repeat < scaled(3000); ++repeat) {
    ReduceCase c(draw_case(random, repeat % 10 == 0 ? 40 : 12), random);
    c.tile_bytes = int64_t{1 << 10} << draw(random, 0, 7);
    Given given(c.capacity(0));
    prepare_reduction(uec::SingleThread{}, c, 0, given);
    check_schedule(c, given);
    check_sums(c, given);
    if (c.mode < 0) ++chose[static_cast<int>(given.schedule.schedule.mode)];
  }
  CHECK(chose[static_cast<int>(Mode::kPull)] > 0 && chose[static_cast<int>(Mode::kDirect)] > 0);
}
