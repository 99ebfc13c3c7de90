// Any quotas and routings: faults are found, shares are exact in both sums, and tokens go where the
// shares say.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/reroute/reroute.hpp"
#include "core/reroute/share_table.hpp"
#include "fuzz/bytes.hpp"
#include "fuzz/checks.hpp"
#include "support/check.hpp"

namespace {

using uec::RerouteFault;

struct Instance {
  int32_t rank, physical_id;
  int64_t quota;
};

// An expert's instances by ascending rank.
std::vector<Instance> instances_of(const RoutingCase& c, int32_t expert) {
  std::vector<Instance> found;
  const PlanCase& g = c.group;
  for (int32_t r = 0; r < g.num_ranks; ++r) {
    if (g.home[expert] == r) found.push_back({r, c.main_id[expert], c.home_quota[expert]});
    for (int32_t slot = 0; slot < g.slots_per_rank; ++slot) {
      const int32_t i = r * g.slots_per_rank + slot;
      if (g.slot_expert[i] == expert) found.push_back({r, c.slot_id[r] + slot, c.slot_quota[i]});
    }
  }
  return found;
}

// Whether tokens could be rerouted at all. Domains do not matter here.
bool is_sound(const RoutingCase& c) {
  PlanCase anywhere = c.group;
  anywhere.allow_cross_domain = true;
  if (fuzz::first_fault(anywhere).fault != uec::PlanFault::kNone) return false;
  if (std::any_of(c.load.begin(), c.load.end(), [](int32_t load) { return load < 0; }))
    return false;
  for (int32_t e = 0; e < c.group.num_experts; ++e) {
    int64_t load = 0, quotas = 0;
    for (int32_t r = 0; r < c.group.num_ranks; ++r) load += c.load[r * c.group.num_experts + e];
    for (const Instance& instance : instances_of(c, e)) {
      if (instance.quota < 0) return false;
      quotas += instance.quota;
    }
    if (load != quotas || load > uec::kMaxLoad) return false;
  }
  return true;
}

// [source][instance]: a rank's own quota first; then, source by source, cuts of the line of all
// that is left in proportion to the source's rest.
std::vector<std::vector<int64_t>> exact_shares(const RoutingCase& c, int32_t expert) {
  const int32_t num_ranks = c.group.num_ranks;
  std::vector<Instance> instances = instances_of(c, expert);
  std::vector<std::vector<int64_t>> shares(num_ranks, std::vector<int64_t>(instances.size(), 0));
  std::vector<int64_t> rest(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) rest[r] = c.load[r * c.group.num_experts + expert];
  for (size_t i = 0; i < instances.size(); ++i) {
    const int64_t kept = std::min(rest[instances[i].rank], instances[i].quota);
    rest[instances[i].rank] -= kept;
    instances[i].quota -= kept;
    shares[instances[i].rank][i] = kept;
  }
  for (int32_t r = 0; r < num_ranks; ++r) {
    __int128 all = 0, upto = 0, given = 0;
    for (const Instance& instance : instances) all += instance.quota;
    for (size_t i = 0; i < instances.size() && rest[r] > 0; ++i) {
      upto += instances[i].quota;
      const auto cut = rest[r] * upto / all;
      shares[r][i] += static_cast<int64_t>(cut - given);
      instances[i].quota -= static_cast<int64_t>(cut - given);
      given = cut;
    }
  }
  return shares;
}

// The table of shares, looked up by ordinal, says the same as the shares one by one.
void check_table(const RoutingCase& c, const HostShares& host) {
  const PlanCase& g = c.group;
  std::vector<uec::Turn> turns(g.num_ranks);
  std::vector<int32_t> rank(g.num_ranks), quota(g.num_ranks), begin(g.num_experts + 1);
  std::vector<uec::ShareEntry> entries(c.num_entries());
  const uec::ShareTable table{begin.data(), entries.data()};
  uint64_t worst = 0;
  for (int32_t e = 0; e < g.num_experts; ++e)
    worst = std::max(
        worst, uec::share_into_table(uec::SingleThread{}, g.topology(), c.ids(), c.plan(), c.source,
                                     e, {turns.data(), rank.data(), quota.data()}, table));
  check_equal(
      worst == 0 ? uec::RerouteStatus{} : uec::explain_plan_fault(g.topology(), c.plan(), worst),
      host.status);
  if (worst != 0) return;
  host.check(table, g.num_experts);
  for (int32_t e = 0; e < g.num_experts; ++e) {
    const int32_t load = c.row()[e];
    CHECK_EQ(uec::find_instance(begin.data(), entries.data(), e, load), -1);
    if (load > 0) CHECK(uec::find_instance(begin.data(), entries.data(), e, load - 1) >= 0);
  }
}

// This source's tokens in an order that the bytes choose, with padding between them.
std::vector<int64_t> draw_ids(fuzz::Bytes& bytes, const RoutingCase& c) {
  std::vector<int64_t> ids;
  for (int32_t e = 0; e < c.group.num_experts; ++e) ids.insert(ids.end(), c.row()[e], e);
  ids.insert(ids.begin(), bytes.small(0, 3), -1);
  for (size_t i = ids.size(); i > 1; --i)
    std::swap(ids[i - 1], ids[bytes.draw(0, static_cast<int64_t>(i) - 1)]);
  return ids;
}

void check_map(const RoutingCase& c, const HostShares& host, const std::vector<int64_t>& ids,
               const std::vector<int64_t>& out) {
  const int64_t num_experts = c.group.num_experts, row_size = c.group.num_ranks * c.per_rank;
  const auto num_tokens = static_cast<int64_t>(ids.size());
  std::vector<uint8_t> map(num_tokens * num_experts, 0);
  std::vector<int64_t> expected_from, expected_to;
  for (int64_t j = 0; j < num_tokens; ++j) {
    if (ids[j] < 0) continue;
    map[j * num_experts + ids[j]] = 1;
    expected_from.push_back(j * num_experts + ids[j]);
    expected_to.push_back(j * row_size + out[j]);
  }
  std::vector<int64_t> from(expected_from.size()), to(expected_from.size());
  const auto status = uec::reroute_map(c.group.topology(), map.data(), num_tokens, host.scratch,
                                       from.data(), to.data());
  CHECK(status.fault == RerouteFault::kNone);
  CHECK(from == expected_from && to == expected_to);
}

void check_tokens(fuzz::Bytes& bytes, const RoutingCase& c, const HostShares& host,
                  const std::vector<std::vector<int64_t>>& shares) {
  std::vector<int64_t> ids = draw_ids(bytes, c), out(ids.size(), -9);
  const int32_t num_experts = c.group.num_experts;
  const auto size = static_cast<int64_t>(ids.size());
  const auto reroute = [&] {
    return uec::reroute_tokens(ids.data(), size, num_experts, host.scratch, out.data());
  };
  CHECK(reroute().fault == RerouteFault::kNone);
  std::vector<std::vector<int64_t>> left = shares;  // by expert
  std::vector<size_t> turn(num_experts, 0);
  for (int64_t j = 0; j < size; ++j) {
    if (ids[j] == -1) {
      CHECK_EQ(out[j], -1);
      continue;
    }
    const auto e = static_cast<int32_t>(ids[j]);
    while (left[e][turn[e]] == 0) ++turn[e];  // the first instance whose share is not used up
    --left[e][turn[e]];
    CHECK_EQ(out[j], instances_of(c, e)[turn[e]].physical_id);
  }
  for (const auto& shares_left : left)
    for (const int64_t share : shares_left) CHECK_EQ(share, 0);
  check_map(c, host, ids, out);

  if (ids.empty()) return;
  const auto at = static_cast<size_t>(bytes.draw(0, size - 1));
  const int64_t was = ids[at], bad = bytes.draw(INT64_MIN, INT64_MAX);
  ids[at] = bad;
  const uec::RerouteStatus status = reroute();
  if (bad == was) {
    CHECK(status.fault == RerouteFault::kNone);
  } else if (bad < -1 || bad >= num_experts) {
    CHECK(status.fault == RerouteFault::kIdOutOfRange);
    CHECK_EQ(status.position, at);
    CHECK_EQ(status.value, bad);
  } else {  // one expert has a token less, or one more
    CHECK(status.fault == RerouteFault::kCountMismatch);
    CHECK(status.expert == was || status.expert == bad);
    CHECK_EQ(status.counted - status.expected, status.expert == was ? -1 : 1);
  }
}

void check_sources(fuzz::Bytes& bytes, RoutingCase& c) {
  const int32_t num_experts = c.group.num_experts;
  std::vector<std::vector<std::vector<int64_t>>> exact;  // [expert][source][instance]
  std::vector<std::vector<int64_t>> served;              // [expert][instance]
  for (int32_t e = 0; e < num_experts; ++e) {
    exact.push_back(exact_shares(c, e));
    served.emplace_back(exact[e][0].size(), 0);
  }
  for (c.source = 0; c.source < c.group.num_ranks; ++c.source) {
    const HostShares host(c);
    CHECK(host.status.fault == RerouteFault::kNone);
    check_table(c, host);
    std::vector<std::vector<int64_t>> shares;
    int64_t tokens = 0;
    for (int32_t e = 0; e < num_experts; ++e) {
      const std::vector<Instance> instances = instances_of(c, e);
      int64_t sum = 0;
      shares.emplace_back();
      for (size_t i = 0; i < instances.size(); ++i) {
        const int64_t share = host.scratch.share[host.scratch.begin[e] + static_cast<int32_t>(i)];
        CHECK(share >= 0);
        CHECK_EQ(share, exact[e][c.source][i]);
        if (instances[i].rank == c.source)
          CHECK(share >= std::min<int64_t>(c.row()[e], instances[i].quota));
        shares[e].push_back(share);
        served[e][i] += share;
        sum += share;
      }
      CHECK_EQ(sum, c.row()[e]);
      tokens += sum;
    }
    if (tokens <= 400) check_tokens(bytes, c, host, shares);
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    const std::vector<Instance> instances = instances_of(c, e);
    for (size_t i = 0; i < instances.size(); ++i) CHECK_EQ(served[e][i], instances[i].quota);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  RoutingCase c = fuzz::draw_routing(bytes);
  if (is_sound(c)) {
    check_sources(bytes, c);
    return 0;
  }
  const HostShares host(c);
  CHECK(host.status.fault != RerouteFault::kNone);
  check_table(c, host);
  return 0;
}
