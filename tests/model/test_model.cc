// The modelled machine: whatever the plan and the machine, every slot is filled once, and no link
// is used for longer than the transfer takes.
#include "check.hpp"
#include "model/transfer.hpp"
#include "plans.hpp"

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
  if (draw(random, 0, 1) == 0) return m;
  m.domain_size = 0;
  m.shared = 0.1 * draw(random, 1, 10);
  m.read = draw(random, 0, 2) == 0 ? 0 : rate();
  m.group_ps = draw(random, 0, 1) * draw(random, 1, 3'000'000);
  return m;
}

void check_outcome(const PlanCase& c, const Transfer& transfer, const Outcome& found) {
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
  for (int32_t r = 0; r < c.num_ranks; ++r) {  // over two links: near and far
    CHECK(found.egress_busy[r] <= 2 * end);
    CHECK(found.ingress_busy[r] <= 2 * end);
  }
  int64_t moved = 0;
  for (const Span& span : found.spans) {
    CHECK(0 <= span.begin && span.begin < span.end && span.end <= end);
    moved += span.bytes;
    CHECK_EQ(span.bytes > 0, span.kind == SpanKind::kStore || span.kind == SpanKind::kLoad);
  }
  CHECK_EQ(moved, sent);
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

}  // namespace

int main() {
  Random random(7);
  for (int i = 0; i < scaled(400); ++i) {
    PlanCase c = draw_case(random, 9);
    c.allow_cross_domain = true;
    const std::vector<int32_t> one_domain(c.num_ranks);
    c.domain = one_domain;
    Transfer transfer;
    transfer.topology = c.topology();
    transfer.slot_expert = c.slot_expert.data();
    for (int32_t s = draw(random, 1, 3); s > 0; --s)
      transfer.segment_bytes.push_back(draw(random, 0, 300'000));
    transfer.tile_bytes = 1 << draw(random, 11, 16);
    const Machine machine = draw_machine(random);
    for (int32_t mode = 0; mode < uec::kNumModes; ++mode) {
      transfer.mode = mode;
      const Result result = uec::model::model_transfer(transfer, machine, true);
      CHECK(result.mode == static_cast<uec::Mode>(mode));
      check_outcome(c, transfer, result.outcome);
      check_same(result.outcome, uec::model::model_transfer(transfer, machine, true).outcome);
    }
    transfer.parent = draw_parents(c, random);
    transfer.chunk_tiles = draw(random, 1, 9);
    if (transfer.parent.empty()) continue;
    check_outcome(c, transfer, uec::model::model_transfer(transfer, machine, true).outcome);
  }
  return 0;
}
