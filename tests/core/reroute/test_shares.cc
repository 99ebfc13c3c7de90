// The table of shares, made an expert at a time by one thread or several, against compute_shares():
// every integer, and every fault.
//
// What the shares are, tests/fuzz/fuzz_reroute.cc defines a second time.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/crowd.hpp"
#include "core/reroute/share_table.hpp"
#include "support/check.hpp"
#include "support/routings.hpp"

namespace {

// Working memory and table exactly as large as the header says.
struct Memory {
  explicit Memory(const RoutingCase& c)
      : turns(c.group.num_ranks),
        rank(c.group.num_ranks),
        quota(c.group.num_ranks),
        begin(c.group.num_experts + 1),
        entries(c.num_entries()) {}
  uec::ShareScratch scratch() { return {turns.data(), rank.data(), quota.data()}; }
  uec::ShareTable table() { return {begin.data(), entries.data()}; }

  std::vector<uec::Turn> turns;
  std::vector<int32_t> rank, quota, begin;
  std::vector<uec::ShareEntry> entries;
};

template <class Team>
uint64_t share_all(const Team& team, const RoutingCase& c, Memory& memory) {
  uint64_t worst = 0;
  for (int32_t e = 0; e < c.group.num_experts; ++e) {
    worst = std::max(worst, uec::share_into_table(team, c.group.topology(), c.ids(), c.plan(),
                                                  c.source, e, memory.scratch(), memory.table()));
    team.sync();
  }
  return worst;
}

void check_case(const RoutingCase& c, int32_t team_size) {
  const HostShares host(c);
  Memory memory(c);
  uint64_t worst = 0;
  if (team_size == 1) {
    worst = share_all(uec::SingleThread{}, c, memory);
  } else {
    for (const uint64_t word : Crowd::run(team_size, [&] { return share_all(Crowd{}, c, memory); }))
      worst = std::max(worst, word);
  }
  const uec::RerouteStatus status =
      worst == 0 ? uec::RerouteStatus{}
                 : uec::explain_plan_fault(c.group.topology(), c.plan(), worst);
  check_equal(status, host.status);
  if (worst != 0) return;
  host.check(memory.table(), c.group.num_experts);
  for (int32_t e = 0; e < c.group.num_experts; ++e) {
    const int32_t begin = host.scratch.begin[e], end = host.scratch.begin[e + 1];
    int32_t ordinal = 0;
    for (int32_t i = begin; i < end; ++i) {
      if (host.scratch.share[i] == 0) continue;
      for (const int32_t j : {ordinal, ordinal + host.scratch.share[i] - 1})
        CHECK_EQ(uec::find_instance(memory.begin.data(), memory.entries.data(), e, j),
                 host.scratch.physical_id[i]);
      ordinal += host.scratch.share[i];
    }
    CHECK_EQ(uec::find_instance(memory.begin.data(), memory.entries.data(), e, ordinal), -1);
  }
}

// Parts of sums at the limits of what a product and a ratio hold.
void check_part(Random& random) {
  const auto top = (uint32_t{1} << 31) - 1;
  const auto drawn = static_cast<uint32_t>(random());
  const uint32_t remaining = draw(random, 0, 1) == 0 ? top - drawn % 9 : 1 + drawn % top;
  const uint32_t edges[] = {1, remaining / 2 + 1, remaining - remaining / 7, remaining};
  for (const uint32_t rest : edges) {
    const uec::Turn turn = uec::make_turn(rest, remaining);
    for (const uint32_t quota : {0u, 1u, remaining / 3, remaining - 1, remaining, rest})
      CHECK_EQ(uec::part_of(turn, quota), uint64_t{rest} * quota / remaining);
  }
}

RoutingCase draw_case(Random& random) {
  RoutingCase c = draw_group(random, draw(random, 1, 9), draw(random, 1, 12), draw(random, 0, 3));
  draw_plan(c, random, draw(random, 0, 3) == 0 ? 50'000'000 : draw(random, 1, 30));
  if (draw(random, 0, 2) == 0) break_plan(c, random);
  return c;
}

}  // namespace

int main() {
  Random random(5);
  for (int i = 0; i < scaled(20000); ++i) check_part(random);
  for (int i = 0; i < scaled(20000); ++i) check_case(draw_case(random), 1);
  for (int i = 0; i < scaled(300); ++i) check_case(draw_case(random), draw(random, 2, 5));
}
