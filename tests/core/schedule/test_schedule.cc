// What every schedule must satisfy, for many plans: groups are covered, and the egress that hubs
// were balanced by is the egress that their ranges cause.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/schedule/cost.hpp"
#include "core/schedule/schedule.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::kEgressUnit;
using uec::Mode;

// The domain of entry x's replicas; that of the group if plans stay inside domains.
int32_t domain_of(const PlanCase& c, const uec::Schedule& s, int32_t x) {
  return c.allow_cross_domain ? c.domain[s.replica_rank[s.first[x]]] : 0;
}
bool is_foreign(const PlanCase& c, const uec::Schedule& s, int32_t x) {
  return c.allow_cross_domain && c.domain[s.source[x].rank] != domain_of(c, s, x);
}

// Whether a rank of `domain` has the expert, and keeps it.
bool is_held_in(const PlanCase& c, int32_t expert, int32_t domain) {
  if (c.domain[c.home[expert]] == domain) return true;
  for (size_t at = 0; at < c.resident.size(); ++at)
    if (c.slot_expert[at] == expert && !c.moves(at) &&
        c.domain[static_cast<int32_t>(at) / c.slots_per_rank] == domain)
      return true;
  return false;
}

void check_shape(const PlanCase& c, const ScheduleArrays& a) {
  const uec::Schedule& s = a.schedule;
  const auto slot = [&c](int32_t r, int32_t i) { return c.slot_expert[r * c.slots_per_rank + i]; };
  CHECK(s.num_experts <= a.max_experts);
  CHECK_EQ(s.first[0], 0);
  CHECK_EQ(s.first[s.num_experts], c.num_replicas());
  CHECK_EQ(a.shape.num_replicas, c.num_replicas());
  std::vector<int32_t> exports(c.num_ranks), imports(c.num_ranks);
  int32_t max_fanout = 0;
  bool relays = false;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t domain = domain_of(c, s, x);
    CHECK(x == 0 || s.expert[x - 1] < s.expert[x] ||
          (s.expert[x - 1] == s.expert[x] && domain_of(c, s, x - 1) < domain));
    CHECK(s.num_replicas(x) > 0);
    CHECK(!is_foreign(c, s, x) || !is_held_in(c, s.expert[x], domain));
    relays |= is_foreign(c, s, x) && s.num_replicas(x) > 1;
    max_fanout = std::max(max_fanout, s.num_replicas(x));
    const int32_t source = s.source[x].rank;
    if (s.source[x].slot == uec::kMainSlot) {
      CHECK_EQ(source, c.home[s.expert[x]]);
    } else {  // the slot holds the expert, and is not written to
      CHECK_EQ(c.resident[source * c.slots_per_rank + s.source[x].slot], s.expert[x]);
      CHECK_EQ(slot(source, s.source[x].slot), s.expert[x]);
    }
    ++exports[source];
    for (int32_t i = s.first[x]; i < s.first[x + 1]; ++i) {
      CHECK(i == s.first[x] || s.replica_rank[i - 1] < s.replica_rank[i]);
      if (c.allow_cross_domain) CHECK_EQ(c.domain[s.replica_rank[i]], domain);
      CHECK_EQ(slot(s.replica_rank[i], s.replica_slot[i]), s.expert[x]);
      CHECK(c.moves(s.replica_rank[i] * c.slots_per_rank + s.replica_slot[i]));
      ++imports[s.replica_rank[i]];
    }
  }
  bool chained = false;
  for (int32_t r = 0; r < c.num_ranks; ++r) chained |= exports[r] > 0 && imports[r] > 0;
  CHECK_EQ(a.shape.max_exports, *std::max_element(exports.begin(), exports.end()));
  CHECK_EQ(a.shape.max_imports, *std::max_element(imports.begin(), imports.end()));
  CHECK_EQ(a.shape.max_fanout, max_fanout);
  CHECK_EQ(a.shape.chained, chained);
  CHECK_EQ(a.shape.relays, relays);
}

void check_hubs(const PlanCase& c, const uec::TileMap& tiles, Mode mode, const ScheduleArrays& a) {
  const uec::Schedule& s = a.schedule;
  CHECK(s.mode == mode);
  // Egress that the ranges imply, and how far rounding to whole groups may take it off.
  std::vector<double> implied(c.num_ranks), slack(c.num_ranks);
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x), source = s.source[x].rank;
    const int64_t groups = tiles.num_groups();
    const int32_t* bounds = s.boundaries(x);
    CHECK_EQ(bounds[0], 0);
    CHECK_EQ(bounds[n + 1], groups);
    for (int32_t hub = 0; hub <= n; ++hub) CHECK(bounds[hub] <= bounds[hub + 1]);
    if (n == 1 || mode == Mode::kDirect)
      CHECK_EQ(bounds[1], groups);  // the source alone
    else if (is_foreign(c, s, x))
      CHECK_EQ(bounds[1], 0);  // each group crosses to one replica
    implied[source] += kEgressUnit;
    if (n == 1 || groups == 0) continue;
    if (mode != Mode::kDirect) {  // each boundary is the nearest to its hubs' shares
      const int64_t total = (n - 1) * kEgressUnit;
      const int64_t* extra = a.extra.data() + s.first[x] + x;
      int64_t sum = 0;
      for (int32_t hub = 0; hub <= n; ++hub) {
        sum += extra[hub];
        CHECK(2 * std::abs(bounds[hub + 1] * total - sum * groups) <= total);
      }
    }
    const double unit = static_cast<double>(n - 1) * kEgressUnit / static_cast<double>(groups);
    for (int32_t hub = 0; hub <= n; ++hub) {
      const int32_t r = hub == 0 ? source : s.replica_rank[s.first[x] + hub - 1];
      implied[r] += (bounds[hub + 1] - bounds[hub]) * unit;
      slack[r] += unit;
    }
  }
  int64_t total = 0;
  for (int32_t r = 0; r < c.num_ranks; ++r) {
    CHECK(s.egress[r] >= 0);
    total += s.egress[r];
    if (tiles.num_tiles() == 0) continue;
    CHECK(std::abs(implied[r] - static_cast<double>(s.egress[r])) <= slack[r] + 1);
  }
  CHECK_EQ(total, kEgressUnit * a.shape.num_replicas);
}

void check_case(const PlanCase& c, const uec::TileMap& tiles) {
  int64_t busiest_direct = 0;
  for (const Mode mode : {Mode::kDirect, Mode::kPush, Mode::kPull}) {
    const ScheduleArrays a(c, tiles, mode);
    check_shape(c, a);
    check_hubs(c, tiles, mode, a);
    const int64_t busiest = *std::max_element(a.egress.begin(), a.egress.end());
    if (mode == Mode::kDirect)
      busiest_direct = busiest;
    else if (!a.shape.relays)  // where a foreign source, however idle, is not to send all copies
      // A fill moves egress to the emptiest ranks; units that do not divide cost one each.
      CHECK(busiest <= busiest_direct + 4 * a.shape.num_replicas);
    const ScheduleArrays again(c, tiles, mode);
    CHECK(a.boundary == again.boundary && a.egress == again.egress);
  }
}

// By cost it would be direct, where a second hop takes so long; but an expert crosses to a domain
// once, unless a rank there has it.
void check_choice_across_domains() {
  const Tiles tiles({6 << 20}, 32 << 10);  // 192 groups of a tile
  PlanCase c = make_group(7, 7, 2);
  c.domain = {4, 2, 2, 2, 4, 3, 3};
  c.allow_cross_domain = true;
  c.resident = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, -1, -1, -1};
  c.slot_expert = {-1, -1, 0, -1, -1, 0, 0, -1, 0, -1, 0, -1, 0, -1};
  const ScheduleArrays a(c, tiles.map(), Mode::kPull);
  CHECK(a.shape.relays);
  const uec::CostModel cost{.store_per_kib = 1, .hop = int64_t{1} << 40};
  for (const bool may_pull : {true, false}) {
    ScheduleArrays chosen(c, tiles.map(), Mode::kDirect);
    const uec::ScheduleScratch scratch{chosen.count.data(), chosen.exports.data(),
                                       chosen.order.data(), chosen.extra.data()};
    uec::choose_hubs(uec::SingleThread{}, c.topology(), tiles.map(), chosen.shape, -1, may_pull,
                     cost, scratch, chosen.schedule);
    CHECK(chosen.schedule.mode == (may_pull ? Mode::kPull : Mode::kPush));
    CHECK(chosen.boundary == a.boundary && chosen.egress == a.egress);
  }
}

}  // namespace

int main() {
  check_choice_across_domains();
  Random random(11);
  const Tiles large({3 << 20, 1 << 20}, 32 << 10), small({1, 3}, 32 << 10);
  const Tiles odd({(64 << 10) + 1, 100}, 64 << 10), none({}, 32 << 10);
  for (int repeat = 0; repeat < scaled(6000); ++repeat) {
    PlanCase c = draw_case(random, repeat % 10 == 0 ? 40 : 12);
    if (repeat % 2 == 1) draw_residents(c, random);
    for (const Tiles* tiles : {&large, &small, &odd, &none}) check_case(c, tiles->map());
  }
}
