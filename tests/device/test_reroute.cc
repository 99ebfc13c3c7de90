// The reroute's kernels on the emulated device against the core's functions: every integer, every
// byte and every fault, over several launches on the same state.
#include <cstdio>
#include <limits>

#include "device/emulated_reroute.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

// The ids that the source's load counts, in any order, with padding.
template <class Id>
std::vector<Id> draw_ids(const RoutingCase& c, Random& random) {
  std::vector<Id> ids;
  for (int32_t e = 0; e < c.group.num_experts; ++e)
    ids.insert(ids.end(), c.row()[e], static_cast<Id>(e));
  if (draw(random, 0, 1) == 0) ids.insert(ids.end(), draw(random, 0, 12), Id{-1});
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

template <class Id>
void break_ids(std::vector<Id>& ids, int32_t num_experts, Random& random) {
  for (int32_t times = draw(random, 1, 3); times > 0 && !ids.empty(); --times) {
    Id& any = ids[draw(random, 0, static_cast<int32_t>(ids.size()) - 1)];
    switch (draw(random, 0, 4)) {
      case 0:
        any = static_cast<Id>(num_experts);
        break;
      case 1:
        any = std::numeric_limits<Id>::min() + draw(random, 0, 1);  // as 32 bits 0, or 1
        break;
      case 2:
        ids.pop_back();
        break;
      default:
        any = static_cast<Id>(draw(random, -2, num_experts - 1));
    }
  }
}

// Later work on a stream uses the outputs, also after a fault.
template <class Id>
void check_harmless(const RoutingCase& c, const std::vector<Id>& out) {
  for (const Id id : out) CHECK(id >= -1 && id < c.group.num_ranks * c.per_rank);
}

template <class Id>
void check_ids(const RoutingCase& c, const HostShares& host, EmulatedReroute& device,
               Random& random) {
  std::vector<Id> ids = draw_ids<Id>(c, random);
  if (draw(random, 0, 3) == 0) break_ids(ids, c.group.num_experts, random);
  const auto num_ids = static_cast<int64_t>(ids.size());
  std::vector<Id> expected(ids.size()), out(ids.size(), Id{-77});
  device.box = {};
  uec::RerouteStatus status = host.status;
  if (status.fault == uec::RerouteFault::kNone)
    status = uec::reroute_tokens(ids.data(), num_ids, c.group.num_experts, host.scratch,
                                 expected.data());
  device.reroute(ids.data(), num_ids, out.data());
  check_equal(device.status(), status);
  CHECK_EQ(device.box.routing, status.fault == uec::RerouteFault::kNone ? 0 : 1);
  check_harmless(c, out);
  if (status.fault == uec::RerouteFault::kNone) CHECK(out == expected);
}

// `bytes` in a buffer of its own, from an address that is `skew` beyond an aligned one.
struct Skewed {
  Skewed(int64_t bytes, int64_t skew) : all(bytes + skew, 0x5A), skew(skew) {}
  uint8_t* data() { return all.data() + skew; }

  std::vector<uint8_t> all;
  int64_t skew;
};

void check_map(const RoutingCase& c, const HostShares& host, EmulatedReroute& device,
               int32_t max_tokens, Random& random) {
  const int32_t num_experts = c.group.num_experts;
  const int32_t least = *std::max_element(c.row(), c.row() + num_experts);
  const int32_t num_tokens = draw(random, least, std::max(least, max_tokens));
  std::vector<uint8_t> map(int64_t{num_tokens} * num_experts, 0);
  for (int32_t e = 0; e < num_experts; ++e) {
    for (int32_t t = 0; t < c.row()[e]; ++t) map[t * num_experts + e] = 1;
    for (int32_t t = num_tokens; t > 1; --t)
      std::swap(map[(t - 1) * num_experts + e], map[draw(random, 0, t - 1) * num_experts + e]);
  }
  if (!map.empty() && draw(random, 0, 3) == 0)
    map[draw(random, 0, static_cast<int32_t>(map.size()) - 1)] ^= 1;

  const int32_t prob_bytes = 1 << draw(random, 0, 3);
  const int64_t width = int64_t{c.group.num_ranks} * c.per_rank;
  const bool with_probs = draw(random, 0, 4) != 0;
  Skewed probs(static_cast<int64_t>(map.size()) * prob_bytes, prob_bytes * draw(random, 0, 3));
  for (uint8_t& byte : probs.all) byte = static_cast<uint8_t>(random());
  Skewed out(num_tokens * width, draw(random, 0, 15));
  Skewed physical(num_tokens * width * prob_bytes, prob_bytes * draw(random, 0, 15));
  std::vector<int32_t> instances(draw(random, 0, 1) == 0 ? map.size() : 0, -77);
  device.box = {};
  device.reroute_map(map.data(), num_tokens, out.data(), with_probs ? probs.data() : nullptr,
                     with_probs ? physical.data() : nullptr, prob_bytes,
                     instances.empty() ? nullptr : instances.data());

  uec::RerouteStatus status = host.status;
  std::vector<int64_t> from(map.size() + 1), to(map.size() + 1);
  if (status.fault == uec::RerouteFault::kNone)
    status = uec::reroute_map(c.group.topology(), map.data(), num_tokens, host.scratch, from.data(),
                              to.data());
  check_equal(device.status(), status);
  CHECK_EQ(device.box.routing, status.fault == uec::RerouteFault::kNone ? 0 : 2);
  for (int64_t i = 0; i < num_tokens * width; ++i) CHECK(out.data()[i] <= 1);
  for (const int32_t instance : instances) CHECK(instance >= -1 && instance < width);
  if (status.fault != uec::RerouteFault::kNone) return;
  std::vector<int32_t> expected_instances(instances.size(), -1);
  Skewed expected(num_tokens * width, out.skew);
  Skewed expected_probs(num_tokens * width * prob_bytes, physical.skew);
  std::fill_n(expected.data(), num_tokens * width, uint8_t{0});
  if (with_probs) std::fill_n(expected_probs.data(), num_tokens * width * prob_bytes, uint8_t{0});
  const int64_t moves = std::count(map.begin(), map.end(), uint8_t{1});
  for (int64_t i = 0; i < moves; ++i) {
    expected.data()[to[i]] = 1;
    if (!instances.empty()) expected_instances[from[i]] = static_cast<int32_t>(to[i] % width);
    if (with_probs)
      std::copy_n(probs.data() + from[i] * prob_bytes, prob_bytes,
                  expected_probs.data() + to[i] * prob_bytes);
  }
  CHECK(out.all == expected.all);
  CHECK(physical.all == expected_probs.all);
  CHECK(instances == expected_instances);
}

// Checks 32-bit ids, 64-bit ids, or a map.
void check_one(int kind, const RoutingCase& c, const HostShares& host, EmulatedReroute& device,
               int32_t max_tokens, Random& random) {
  switch (kind) {
    case 0:
      return check_ids<int32_t>(c, host, device, random);
    case 1:
      return check_ids<int64_t>(c, host, device, random);
    default:
      return check_map(c, host, device, max_tokens, random);
  }
}

// Plans and routings of one group share one state.
int check_group(uint32_t seed) {
  Random random(seed);
  const int32_t num_experts = draw(random, 0, 9) == 0 ? draw(random, 20, 30) : draw(random, 1, 7);
  RoutingCase c = draw_group(random, draw(random, 1, 5), num_experts, draw(random, 0, 3));
  const int32_t most = num_experts > 7 ? 1 : draw(random, 0, 9);
  constexpr int32_t kMaxTokens = 60;
  EmulatedReroute device(c, most * num_experts + 12, kMaxTokens,
                         draw(random, 0, 1) == 0 ? 7 : draw(random, 0, 2));
  constexpr int kCalls = 6;
  for (int call = 0; call < kCalls; ++call) {
    if (call % 2 == 0) {  // the table serves two
      draw_plan(c, random, most);
      if (draw(random, 0, 5) == 0) break_plan(c, random);
      device.share();
    }
    const HostShares host(c);
    if (host.status.fault == uec::RerouteFault::kNone)
      host.check(device.table(), c.group.num_experts);
    else if (*std::max_element(c.load.begin(), c.load.end()) > most)
      continue;  // no routing has as many tokens as this load
    if (*std::min_element(c.load.begin(), c.load.end()) < 0) continue;
    check_one(draw(random, 0, 2), c, host, device, kMaxTokens, random);
  }
  return kCalls;
}

// Several runs of blocks with as many threads as on a device, each kind of routing once.
int check_full_blocks(uint32_t seed) {
  constexpr int32_t kExperts = 24, kMost = 180, kMaxTokens = 230;
  Random random(seed);
  RoutingCase c = draw_group(random, 5, kExperts, 3);
  EmulatedReroute device(c, kMost * kExperts + 12, kMaxTokens, static_cast<int32_t>(seed % 3));
  for (int call = 0; call < 3; ++call) {
    draw_plan(c, random, kMost);
    device.share();
    const HostShares host(c);
    CHECK(host.status.fault == uec::RerouteFault::kNone);
    host.check(device.table(), kExperts);
    check_one(call, c, host, device, kMaxTokens, random);
  }
  break_plan(c, random);  // several blocks say so
  device.share();
  return 3;
}

// One block without work.
void check_nothing() {
  Random random(9);
  RoutingCase c = draw_group(random, 3, 4, 1);
  EmulatedReroute device(c, 0, 0, 7);
  draw_plan(c, random, 0);
  device.share();
  std::vector<int32_t> none;
  device.reroute<int32_t>(none.data(), 0, none.data());
  check_equal(device.status(), uec::RerouteStatus{});
  device.reroute_map(nullptr, 0, nullptr, nullptr, nullptr, 4);
  check_equal(device.status(), uec::RerouteStatus{});
}

// The host learns of the first, whatever comes before it has taken that.
void check_first_fault_stays() {
  Random random(9);
  RoutingCase c = draw_group(random, 2, 3, 1);
  EmulatedReroute device(c, 4, 0, 7);
  draw_plan(c, random, 0);
  device.share();
  for (const int32_t bad : {77, 78}) {
    std::vector<int32_t> ids{-1, bad}, out(2);
    device.reroute(ids.data(), 2, out.data());
    CHECK_EQ(device.status().value, 77);
    CHECK_EQ(out[1], -1);
  }
  device.box.routing = 0;
  std::vector<int32_t> ids{-1}, out(1);
  device.reroute(ids.data(), 1, out.data());
  CHECK_EQ(device.box.routing, 0);
  ids[0] = 79;
  device.reroute(ids.data(), 1, out.data());
  CHECK_EQ(device.status().value, 79);
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_nothing();
  check_first_fault_stays();
  // On the PTX machine blocks are as large as on a device: some have more than one run of ids.
  const bool full = num_threads() == uec::cuda::kRerouteThreads;
  int calls = 0;
  for (int i = 0; i < (full ? 4 : 0); ++i) calls += check_full_blocks(static_cast<uint32_t>(i));
  const int groups = scaled(full ? 60 : 500);
  for (int i = 0; i < groups; ++i) calls += check_group(static_cast<uint32_t>(i));
  std::printf("%d calls\n", calls);
}
