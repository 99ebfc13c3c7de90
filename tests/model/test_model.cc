// The modelled machine: whatever the plan and the machine, every slot is filled once, no link is
// faster than it is, and nothing is known before it can be.
#include <stdexcept>

#include "audit.hpp"
#include "model/transfer.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::model::Machine;
using uec::model::Outcome;
using uec::model::Result;
using uec::model::Span;
using uec::model::SpanKind;
using uec::model::Transfer;

Machine draw_machine(Random& random) {
  Machine m;
  const auto rate = [&] { return 0.5 * draw(random, 1, 20); };
  for (uec::model::Rate* r : {&m.store, &m.load, &m.far_store, &m.far_load}) *r = {rate(), rate()};
  for (int64_t* latency : {&m.store_ps, &m.flag_ps, &m.load_ps, &m.far_ps})
    *latency = draw(random, 0, 2) == 0 ? 0 : draw(random, 1, 3'000'000);
  m.domain_size = draw(random, 0, 4);
  m.workers = draw(random, 1, 5);
  m.stages = draw(random, 1, 4);
  m.fair = draw(random, 0, 1) == 1;
  m.call_ps = draw(random, 0, 1) * draw(random, 1, 3'000'000);
  for (int64_t* cost : {&m.finish_ps, &m.poll_ps, &m.fetch_ps, &m.store_ps_of_tile, &m.publish_ps})
    *cost = draw(random, 0, 1) * draw(random, 1, 1'000'000);
  if (draw(random, 0, 1) == 0) return m;
  m.domain_size = 0;
  m.shared = 0.1 * draw(random, 1, 10);
  m.read = draw(random, 0, 2) == 0 ? 0 : rate();
  m.group_ps = draw(random, 0, 1) * draw(random, 1, 3'000'000);
  return m;
}

void check_outcome(const PlanCase& c, const Transfer& transfer, const Machine& machine,
                   const Outcome& found) {
  const int64_t bytes =
      std::accumulate(transfer.segment_bytes.begin(), transfer.segment_bytes.end(), int64_t{0});
  int64_t sent = 0, received = 0;
  for (size_t i = 0; i < c.slot_expert.size(); ++i) {
    CHECK_EQ(found.received[i], c.slot_expert[i] < 0 ? 0 : bytes);
    received += found.received[i];
  }
  for (const int64_t s : found.sent) sent += s;
  CHECK_EQ(sent, received);
  const int64_t end = *std::max_element(found.finish.begin(), found.finish.end());
  for (const Span& span : found.spans) {
    CHECK(0 <= span.begin && span.begin < span.end && span.end <= end);
    CHECK_EQ(span.bytes > 0, span.kind == SpanKind::kStore || span.kind == SpanKind::kLoad);
  }
  audit::check_links(machine, found);
  audit::check_latencies(machine, found);
  if (machine.shared == 0 || transfer.mode != static_cast<int32_t>(uec::Mode::kPull))
    audit::check_causes(machine, c.home.data(), found);
}

void check_same(const Outcome& a, const Outcome& b) {
  CHECK(a.finish == b.finish);
  CHECK(a.sent == b.sent);
  CHECK_EQ(a.spans.size(), b.spans.size());
}

// Two levels: the first `relays` replicas of an expert pass it on to the others.
std::vector<int32_t> draw_parents(const PlanCase& c, Random& random) {
  std::vector<int32_t> parent;
  for (int32_t e = 0; e < c.num_experts; ++e) {
    std::vector<int32_t> ranks;
    for (size_t i = 0; i < c.slot_expert.size(); ++i)
      if (c.slot_expert[i] == e) ranks.push_back(static_cast<int32_t>(i) / c.slots_per_rank);
    const auto n = static_cast<int32_t>(ranks.size());
    const int32_t relays = draw(random, 0, n);
    for (int32_t i = 0; i < n; ++i)
      parent.push_back(i < relays || relays == 0 ? c.home[e] : ranks[draw(random, 0, relays - 1)]);
  }
  return parent;
}

// One replica of an expert of one segment, on a machine like any.
struct Tiny {
  std::vector<int32_t> home{0}, domain{0, 0}, slot_expert{-1, 0};
  Transfer transfer;
  Machine machine;

  explicit Tiny(int64_t bytes, int64_t tile_bytes) {
    transfer.topology = {2, 1, 1, home.data(), domain.data(), true};
    transfer.slot_expert = slot_expert.data();
    transfer.segment_bytes = {bytes};
    transfer.tile_bytes = tile_bytes;
    transfer.mode = 0;
    machine.store = machine.load = machine.far_store = machine.far_load = {1, 1};
  }

  bool overflows() const {
    try {
      uec::model::model_transfer(transfer, machine, false);
    } catch (const std::overflow_error&) {
      return true;
    }
    return false;
  }
};

// What the clock, the addresses or the memory cannot hold is refused.
void check_limits() {
  CHECK(!Tiny(1 << 20, 1 << 15).overflows());
  Tiny slow_out(int64_t{1} << 36, 1 << 30);
  CHECK(!slow_out.overflows());
  slow_out.machine.store.egress = 1e9;
  CHECK(slow_out.overflows());
  Tiny slow_in(int64_t{1} << 36, 1 << 30);
  slow_in.machine.stages = 64;  // all tiles are in flight before any is known to be delivered
  slow_in.machine.store.ingress = 1e9;
  CHECK(slow_in.overflows());
  Tiny late(int64_t{1} << 30, 1 << 8);
  late.machine.store_ps = int64_t{1} << 50;
  CHECK(late.overflows());
  CHECK(Tiny(int64_t{1} << 43, 1 << 30).overflows());
  Tiny flags(int64_t{1} << 36, 1 << 15);
  flags.transfer.segment_bytes.resize(64, int64_t{1} << 36);
  CHECK(flags.overflows());
  Tiny wide(1 << 20, 1 << 15);
  wide.machine.workers = wide.machine.stages = 1024;
  CHECK(wide.overflows());
}

}  // namespace

int main() {
  Random random(7);
  for (int i = 0; i < scaled(400); ++i) {
    PlanCase c = draw_case(random, 9);
    c.allow_cross_domain = true;
    const std::vector<int32_t> one_domain(c.num_ranks);
    c.domain = one_domain;  // its values may change, its address not
    Transfer transfer;
    transfer.topology = c.topology();
    transfer.slot_expert = c.slot_expert.data();
    for (int32_t s = draw(random, 1, 3); s > 0; --s)
      transfer.segment_bytes.push_back(draw(random, 0, 300'000));
    transfer.tile_bytes = 1 << draw(random, 11, 16);
    const Machine machine = draw_machine(random);
    for (int32_t r = 0; r < c.num_ranks; ++r)
      c.domain[r] = machine.domain_size > 0 ? r / machine.domain_size : 0;
    for (int32_t mode = 0; mode < uec::kNumModes; ++mode) {
      transfer.mode = mode;
      const Result result = uec::model::model_transfer(transfer, machine, true);
      CHECK(result.mode == static_cast<uec::Mode>(mode));
      check_outcome(c, transfer, machine, result.outcome);
      check_same(result.outcome, uec::model::model_transfer(transfer, machine, true).outcome);
    }
    std::copy(one_domain.begin(), one_domain.end(), c.domain.begin());
    transfer.parent = draw_parents(c, random);
    transfer.chunk_tiles = draw(random, 1, 9);
    if (transfer.parent.empty()) continue;
    check_outcome(c, transfer, machine,
                  uec::model::model_transfer(transfer, machine, true).outcome);
  }
  check_limits();
  return 0;
}
