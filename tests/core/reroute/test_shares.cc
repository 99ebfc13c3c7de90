// The shares of one expert, by one thread and by several, against the definition: source after
// source, with a division for every instance.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/crowd.hpp"
#include "core/reroute/shares.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::SingleThread;

struct Expert {
  std::vector<int32_t> load, rank, quota;
};

// Cumulative shares.
std::vector<int32_t> define(Expert x, int32_t source) {
  const size_t n = x.rank.size();
  std::vector<int64_t> share(n, 0);
  for (size_t i = 0; i < n; ++i) {
    const int32_t kept = std::min(x.load[x.rank[i]], x.quota[i]);
    x.load[x.rank[i]] -= kept;
    x.quota[i] -= kept;
    if (x.rank[i] == source) share[i] = kept;
  }
  for (int32_t r = 0; r <= source; ++r) {
    if (x.load[r] == 0) continue;
    const int64_t remaining = std::accumulate(x.quota.begin(), x.quota.end(), int64_t{0});
    int64_t sum = 0, given = 0;
    for (size_t i = 0; i < n; ++i) {
      sum += x.quota[i];
      const int64_t upto = x.load[r] * sum / remaining;
      x.quota[i] -= static_cast<int32_t>(upto - given);
      if (r == source) share[i] += upto - given;
      given = upto;
    }
  }
  std::partial_sum(share.begin(), share.end(), share.begin());
  return {share.begin(), share.end()};
}

// `most`: tokens of a source.
Expert draw_expert(Random& random, int32_t num_ranks, int32_t most) {
  Expert x;
  int64_t total = 0;
  for (int32_t r = 0; r < num_ranks; ++r) {
    x.load.push_back(draw(random, 0, 3) == 0 ? 0 : draw(random, 0, most));
    total += x.load.back();
  }
  for (int32_t r = 0; r < num_ranks; ++r)
    if (draw(random, 0, 2) != 0) x.rank.push_back(r);
  if (x.rank.empty()) x.rank.push_back(draw(random, 0, num_ranks - 1));
  for (size_t i = 0; i < x.rank.size(); ++i) {
    const bool last = i + 1 == x.rank.size();
    const auto part = last ? total : std::min<int64_t>(total, draw(random, 0, most));
    x.quota.push_back(static_cast<int32_t>(part));
    total -= part;
  }
  std::shuffle(x.quota.begin(), x.quota.end(), random);
  return x;
}

template <int32_t kAtOnce, int32_t kTurns, class Team>
std::vector<int32_t> compute(const Team& team, const Expert& x, int32_t source,
                             std::vector<int32_t>& quota, std::vector<uec::Turn>& turns) {
  for (size_t r = team.index(); r < x.load.size(); r += team.size())
    turns[r].rest = static_cast<uint32_t>(x.load[r]);
  team.sync();
  uec::share_expert<kAtOnce, kTurns>(team, x.load[source], source, x.rank.data(),
                                     static_cast<int32_t>(x.rank.size()), quota.data(),
                                     turns.data());
  return quota;
}

void check_expert(const Expert& x, int32_t source, int32_t team_size) {
  const std::vector<int32_t> expected = define(x, source);
  std::vector<int32_t> quota = x.quota;
  std::vector<uec::Turn> turns(x.load.size());
  if (team_size == 1) {
    CHECK((compute<4, 1>(SingleThread{}, x, source, quota, turns) == expected));
    quota = x.quota;
    CHECK((compute<1, 3>(SingleThread{}, x, source, quota, turns) == expected));
    return;
  }
  const auto each =
      Crowd::run(team_size, [&] { return compute<1, 2>(Crowd{}, x, source, quota, turns); });
  for (const std::vector<int32_t>& result : each) CHECK(result == expected);
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

}  // namespace

int main() {
  Random random(3);
  for (int i = 0; i < scaled(20000); ++i) check_part(random);
  for (int i = 0; i < scaled(20000); ++i) {
    const int32_t num_ranks = draw(random, 1, 12);
    const int32_t most = draw(random, 0, 3) == 0 ? 170'000'000 : draw(random, 1, 40);
    check_expert(draw_expert(random, num_ranks, most), draw(random, 0, num_ranks - 1), 1);
  }
  for (int i = 0; i < scaled(400); ++i) {
    const int32_t num_ranks = draw(random, 1, 12);
    check_expert(draw_expert(random, num_ranks, 40), draw(random, 0, num_ranks - 1),
                 draw(random, 2, 5));
  }
}
