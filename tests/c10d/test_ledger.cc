// Steps of all ranks together: both ends of a message agree, slots and main gradients end up as the
// plan says, whatever calls came before, and digests tell calls apart.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "c10d/ledger.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::GradType;
using uec::Mode;
using uec::ReduceArgs;
using uec::ReplicateArgs;
using uec::c10d::Ledger;
using uec::c10d::Prepared;
using uec::c10d::Step;
using uec::c10d::StepKind;

int64_t num_kept = 0, num_from_residents = 0, num_sums = 0;  // what the cases have had

bool receives(const Step& step) {
  return step.kind == StepKind::kReceive || step.kind == StepKind::kAddGrad ||
         step.kind == StepKind::kAddSum;
}

// A step, and at which rank.
struct Placed {
  int32_t rank;
  const Step* step;
};

// One ledger of each rank.
class Group {
 public:
  Group(const PlanCase& c, std::vector<int64_t> segment_bytes, std::vector<int64_t> grad_bytes,
        Random& random) {
    uec::EngineConfig config;
    config.num_experts = c.num_experts;
    config.slots_per_rank = c.slots_per_rank;
    config.home = c.home;
    config.domain = c.domain;
    config.allow_cross_domain = c.allow_cross_domain;
    config.segment_bytes = std::move(segment_bytes);
    config.grad_bytes = std::move(grad_bytes);
    config.grad_type.assign(config.grad_bytes.size(), GradType::kFloat32);
    config.num_banks = 2;
    config.tile_bytes = draw(random, 0, 1) == 0 ? 32 << 10 : 20 << 10;
    // Chunks of a group to an expert.
    config.cost = {700'000, 0, int64_t{100} << draw(random, 0, 20), 1'000'000, 100};
    for (config.rank = 0; config.rank < c.num_ranks; ++config.rank)
      ledgers_.push_back(std::make_unique<Ledger>(config));
    config.rank = 0;
    config_ = std::move(config);
  }

  const uec::EngineConfig& config() const { return config_; }
  Ledger& operator[](int32_t rank) const { return *ledgers_[rank]; }

  // All ranks make a call; returns what each of them is to do.
  template <class Call>
  std::vector<Prepared> call(Call&& prepare) const {
    std::vector<Prepared> prepared;
    for (const auto& ledger : ledgers_) prepared.push_back(prepare(*ledger));
    for (const Prepared& own : prepared) {
      CHECK_EQ(own.epoch, prepared[0].epoch);
      CHECK(own.digest == prepared[0].digest);
      CHECK(own.mode == prepared[0].mode && own.is_empty == prepared[0].is_empty);
    }
    return prepared;
  }

 private:
  uec::EngineConfig config_;
  std::vector<std::unique_ptr<Ledger>> ledgers_;
};

// Both ends list the same messages in the same order, as backends want it that look at no tag.
void check_ends(const std::vector<Prepared>& prepared) {
  const auto num_ranks = static_cast<int32_t>(prepared.size());
  std::map<std::pair<int32_t, int64_t>, std::vector<const Step*>> sent, received;
  for (int32_t r = 0; r < num_ranks; ++r) {
    std::set<std::tuple<int64_t, bool>> used;  // (round, receives)
    const Step* before[2] = {};
    for (const Step& step : prepared[r].steps) {
      CHECK(step.bytes > 0 && step.offset >= 0 && step.behind < step.round);
      if (&step != prepared[r].steps.data()) CHECK((&step)[-1].round <= step.round);
      if (step.kind == StepKind::kKeepGrad) continue;
      CHECK(0 <= step.peer && step.peer < num_ranks && step.peer != r);
      const bool in = receives(step);
      (in ? received[{static_cast<int32_t>(step.peer), r}] : sent[{r, step.peer}]).push_back(&step);
      // One chunk each way in a round.
      if (!used.insert({step.round, in}).second)
        CHECK(before[in]->peer == step.peer && before[in]->chunk == step.chunk &&
              before[in]->expert == step.expert);
      before[in] = &step;
    }
  }
  CHECK_EQ(sent.size(), received.size());
  for (const auto& [pair, steps] : sent) {
    const std::vector<const Step*>& other = received[pair];
    CHECK_EQ(steps.size(), other.size());
    std::set<int64_t> tags;
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step &a = *steps[i], &b = *other[i];
      CHECK(tags.insert(a.tag).second);
      CHECK_EQ(a.tag, b.tag);
      CHECK_EQ(a.round, b.round);
      CHECK_EQ(a.bytes, b.bytes);
      CHECK(a.segment == b.segment && a.offset == b.offset);
      CHECK(a.expert == b.expert && a.chunk == b.chunk);
      CHECK((a.kind == StepKind::kSendGrad) == (b.kind == StepKind::kAddGrad));
      CHECK((a.kind == StepKind::kSendSum) == (b.kind == StepKind::kAddSum));
    }
  }
}

// Messages, the sender's step first, in the order of rounds.
std::vector<std::pair<Placed, Placed>> messages(const std::vector<Prepared>& prepared) {
  std::map<std::tuple<int64_t, int64_t, int64_t>, Placed> sends;  // (from, to, tag)
  for (int32_t r = 0; r < static_cast<int32_t>(prepared.size()); ++r)
    for (const Step& step : prepared[r].steps)
      if (step.kind != StepKind::kKeepGrad && !receives(step))
        sends[{r, step.peer, step.tag}] = {r, &step};
  std::vector<std::pair<Placed, Placed>> found;
  for (int32_t r = 0; r < static_cast<int32_t>(prepared.size()); ++r)
    for (const Step& step : prepared[r].steps)
      if (receives(step)) found.push_back({sends.at({step.peer, r, step.tag}), {r, &step}});
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.second.step->round < b.second.step->round;
  });
  return found;
}

// What the slots of one bank hold, tile by tile: an expert, and which version of its weights.
class Slots {
 public:
  Slots(const PlanCase& c, const uec::EngineConfig& config) : case_(c), config_(config) {
    for (const int64_t bytes : config.segment_bytes)
      tiles_.emplace_back(c.slot_expert.size() * uec::ceil_div(bytes, config.tile_bytes));
  }

  void transfer(const std::vector<Prepared>& prepared, const std::vector<int32_t>& segments,
                int64_t version, const std::vector<uint8_t>& moves) {
    for (std::vector<Tile>& tiles : tiles_)
      for (Tile& tile : tiles) tile.round = -1, tile.arrivals = 0, tile.is_source = false;
    const std::vector<int32_t> local_idx = case_.local_idx();
    for (const auto& [from, to] : messages(prepared)) {
      const Step &send = *from.step, &receive = *to.step;
      const auto expert = static_cast<int32_t>(send.expert);
      CHECK(receive.kind == StepKind::kReceive);
      if (send.kind == StepKind::kSendMain) {
        CHECK_EQ(case_.home[expert], from.rank);
        CHECK_EQ(local_idx[expert], send.place);
      } else {
        CHECK(send.kind == StepKind::kSendSlot);
        for_each(send, from.rank, [&](Tile& tile) {
          CHECK(tile.expert == expert && tile.version == version);
          CHECK(tile.round <= send.behind);
          tile.is_source |= tile.arrivals == 0;
          num_from_residents += tile.arrivals == 0;
        });
      }
      for_each(receive, to.rank, [&](Tile& tile) {
        CHECK(!tile.is_source);
        tile = {expert, version, static_cast<int32_t>(receive.round), tile.arrivals + 1};
      });
    }
    for (int32_t segment = 0; segment < static_cast<int32_t>(tiles_.size()); ++segment) {
      const bool chosen = std::count(segments.begin(), segments.end(), segment) > 0;
      const int64_t count = num_tiles(segment);
      for (size_t slot = 0; slot < case_.slot_expert.size(); ++slot) {
        const int32_t expert = case_.slot_expert[slot];
        num_kept += expert >= 0 && !moves[slot];
        for (int64_t i = 0; i < count; ++i) {
          const Tile& tile = tiles_[segment][slot * count + i];
          CHECK_EQ(tile.arrivals, chosen && moves[slot]);
          if (chosen && expert >= 0) CHECK(tile.expert == expert && tile.version == version);
        }
      }
    }
  }

  int64_t num_kept = 0, num_from_residents = 0;

 private:
  struct Tile {
    int32_t expert = -1;
    int64_t version = -1;
    int32_t round = -1, arrivals = 0;  // of this call
    bool is_source = false;            // in this call, of what it held before
  };

  int64_t num_tiles(int64_t segment) const {
    return uec::ceil_div(config_.segment_bytes[segment], config_.tile_bytes);
  }
  template <class Body>
  void for_each(const Step& step, int32_t rank, Body&& body) {
    const int64_t all = config_.segment_bytes[step.segment], tile = config_.tile_bytes;
    const int64_t end = step.offset + step.bytes;
    CHECK(step.offset % tile == 0 && (end % tile == 0 || end == all) && end <= all);
    CHECK(0 <= step.place && step.place < case_.slots_per_rank);
    const int64_t slot = rank * case_.slots_per_rank + step.place;
    for (int64_t at = step.offset; at < end; at += tile)
      body(tiles_[step.segment][slot * num_tiles(step.segment) + at / tile]);
  }

  const PlanCase& case_;
  const uec::EngineConfig& config_;
  std::vector<std::vector<Tile>> tiles_;  // [segments][G * S * tiles]
};

// Each part of each main gradient gets the sum of all replicas with tokens, in the order of ranks.
void check_reduction(const PlanCase& c, const uec::EngineConfig& config,
                     const std::vector<Prepared>& prepared, const std::vector<int32_t>& quota) {
  using Sum = std::map<int64_t, int32_t>;              // rank by place in the order of adding
  using Part = std::tuple<int64_t, int64_t, int64_t>;  // gate, segment, offset
  std::vector<std::map<Part, Sum>> sums(c.num_ranks);  // under way, by rank
  std::map<std::tuple<int32_t, int64_t, int64_t>, std::pair<int64_t, Sum>> main_grads;
  const std::vector<int32_t> local_idx = c.local_idx();
  const auto part = [](const Step& s) { return Part{s.gate, s.segment, s.offset}; };
  const auto check_slot = [&](const Step& step, int32_t rank) {
    CHECK(0 <= step.place && step.place < c.slots_per_rank);
    const int64_t slot = rank * c.slots_per_rank + step.place;
    CHECK_EQ(c.slot_expert[slot], step.expert);
    CHECK(quota[slot] > 0);
  };
  const auto replicas = [&](int64_t expert) {
    Sum all;
    for (size_t at = 0; at < c.slot_expert.size(); ++at)
      if (c.slot_expert[at] == expert && quota[at] > 0)
        all[static_cast<int64_t>(all.size())] = static_cast<int32_t>(at) / c.slots_per_rank;
    return all;
  };
  const auto add_to_main = [&](const Step& step, int32_t rank, const Sum& sum) {
    const auto expert = static_cast<int32_t>(step.expert);
    CHECK_EQ(c.home[expert], rank);
    CHECK_EQ(local_idx[expert], step.place);
    CHECK(sum == replicas(expert));
    const bool is_new =
        main_grads.insert({{expert, step.segment, step.offset}, {step.bytes, sum}}).second;
    CHECK(is_new);
  };
  for (int32_t r = 0; r < c.num_ranks; ++r)
    for (const Step& step : prepared[r].steps)
      if (step.kind == StepKind::kKeepGrad) {
        check_slot(step, r);
        CHECK(sums[r][part(step)].insert({step.replica, r}).second);
      }
  for (const auto& [from, to] : messages(prepared)) {
    const Step &send = *from.step, &receive = *to.step;
    if (send.kind == StepKind::kSendGrad) {
      check_slot(send, from.rank);
      Sum& sum = sums[to.rank][part(receive)];
      CHECK(sum.insert({receive.replica, from.rank}).second);
      if (sum == replicas(receive.expert)) {  // what the home does when nothing is missing
        if (c.home[receive.expert] == to.rank)
          add_to_main(receive, to.rank, sum);
        else
          CHECK_EQ(receive.place, -1);
      }
    } else {
      ++num_sums;
      CHECK(send.kind == StepKind::kSendSum && receive.kind == StepKind::kAddSum);
      add_to_main(receive, to.rank, sums[from.rank][part(send)]);
      for (const Step& other : prepared[from.rank].steps)  // all have arrived by then
        if (other.kind == StepKind::kAddGrad && part(other) == part(send))
          CHECK(other.round <= send.behind);
    }
  }
  for (int32_t e = 0; e < c.num_experts; ++e)
    for (int32_t segment = 0; segment < static_cast<int32_t>(config.grad_bytes.size()); ++segment) {
      int64_t next = 0;
      for (auto at = main_grads.lower_bound({e, segment, 0});
           at != main_grads.end() && std::get<0>(at->first) == e &&
           std::get<1>(at->first) == segment;
           ++at) {
        CHECK_EQ(std::get<2>(at->first), next);
        next += at->second.first;
      }
      CHECK_EQ(next, replicas(e).empty() ? 0 : config.grad_bytes[segment]);
    }
}

// Several calls of one group, to either bank or to none.
void check_calls(Random& random) {
  PlanCase c = draw_case(random, 16);
  const std::vector<std::vector<int64_t>> payloads{
      {100}, {(3 << 20) + 4, 4}, {8, 200'000, (64 << 10) + 4}, {1 << 20, 32 << 10}};
  const std::vector<int64_t> bytes = payloads[draw(random, 0, 3)];
  const Group group(c, bytes, bytes, random);
  Slots slots[] = {{c, group.config()}, {c, group.config()}};
  const std::vector<GradType> main_type(bytes.size(), GradType::kBFloat16);
  std::vector<int32_t> segments;
  int64_t unknown = -1;  // version of what no bank knows
  for (int32_t call = 0; call < 6; ++call) {
    if (call == 0) {
      draw_plan(c, random);
    } else {  // a part stays the same, and is copied further
      for (int32_t& expert : c.slot_expert)
        if (draw(random, 0, 4) == 0) expert = -1;
      for (int32_t i = 0; i < c.num_ranks; ++i)
        c.place(draw(random, 0, (c.num_experts - 1) / 3), draw(random, 0, c.num_ranks - 1));
    }
    if (call % 3 == 0) {
      segments.clear();
      for (int32_t i = 0; i < static_cast<int32_t>(bytes.size()); ++i)
        if (draw(random, 0, 3) > 0) segments.push_back(i);
    }
    const int32_t bank = draw(random, 0, 5) == 0 ? -1 : draw(random, 0, 3) / 3;
    if (bank >= 0 && draw(random, 0, 4) == 0)
      for (int32_t r = 0; r < c.num_ranks; ++r) group[r].banks().invalidate(bank);
    const uint64_t version = bank < 0 ? 0 : group[0].banks().version(bank);
    const ReplicateArgs args{.slot_expert = c.slot_expert.data(),
                             .segments = segments.data(),
                             .num_segments = static_cast<int32_t>(segments.size()),
                             .mode = draw(random, -1, 2),
                             .bank = {.index = bank, .version = version}};
    const auto prepared = group.call([&](Ledger& ledger) { return ledger.replicate(args); });
    check_ends(prepared);
    const int64_t own = bank < 0 ? --unknown : static_cast<int64_t>(version);
    slots[std::max(bank, 0)].transfer(prepared, segments, own, group[0].slots_to_fill());

    std::vector<int32_t> quota(c.slot_expert.size());
    for (int32_t& tokens : quota) tokens = draw(random, 0, 3) * 100;
    const int32_t modes[] = {-1, static_cast<int32_t>(Mode::kPull),
                             static_cast<int32_t>(Mode::kDirect)};
    const ReduceArgs sums{.slot_expert = c.slot_expert.data(),
                          .slot_quota = quota.data(),
                          .main_type = main_type.data(),
                          .mode = modes[draw(random, 0, 2)],
                          .bank = bank};
    const auto reductions = group.call([&](Ledger& ledger) { return ledger.reduce(sums); });
    check_ends(reductions);
    check_reduction(c, group.config(), reductions, quota);
    for (size_t at = 0; at < quota.size(); ++at)
      CHECK_EQ(group[0].slots_to_fill()[at], c.slot_expert[at] >= 0 && quota[at] > 0);
  }
  for (const Slots& of_bank : slots) {
    num_kept += of_bank.num_kept;
    num_from_residents += of_bank.num_from_residents;
  }
}

// A part has at most as many bytes as an int has numbers, however long an expert is.
void check_large() {
  PlanCase c = make_group(2, 2, 1);
  CHECK(c.place(0, 1));
  const int64_t bytes = (int64_t{5} << 30) + 3;
  Random random(1);
  const Group group(c, {bytes}, {}, random);
  const int32_t segment = 0;
  const ReplicateArgs args{
      .slot_expert = c.slot_expert.data(), .segments = &segment, .num_segments = 1};
  const auto prepared = group.call([&](Ledger& ledger) { return ledger.replicate(args); });
  check_ends(prepared);
  int64_t next = 0;
  for (const Step& step : prepared[1].steps) {
    CHECK_EQ(step.offset, next);
    next += step.bytes;
  }
  CHECK_EQ(next, bytes);
}

// Calls that differ have other digests, and so have all that follow.
void check_digests() {
  PlanCase c = make_group(4, 8, 2), other = c;
  for (const int32_t r : {1, 2, 3}) CHECK(c.place(0, r));
  other.slot_expert = c.slot_expert;
  other.slot_expert[2] = -1;
  Random random(2);
  const Group group(c, {1 << 20, 100}, {1 << 20}, random);
  const std::vector<int32_t> both{0, 1};
  const GradType main_type = GradType::kFloat32;
  const ReplicateArgs transfer{.slot_expert = c.slot_expert.data(),
                               .plan_digest = 7,
                               .tag = 3,
                               .segments = both.data(),
                               .num_segments = 2,
                               .mode = static_cast<int32_t>(Mode::kPush),
                               .bank = {.index = 0}};
  const ReduceArgs reduction{.slot_expert = c.slot_expert.data(),
                             .plan_digest = 7,
                             .tag = 3,
                             .main_type = &main_type,
                             .mode = static_cast<int32_t>(Mode::kPull)};
  struct Calls {
    std::vector<ReplicateArgs> before{};
    bool gathers = false, reduces_first = false, invalidates = false;
    ReplicateArgs transfer{};
    ReduceArgs reduction{};
  };
  const Calls base{.transfer = transfer, .reduction = reduction};
  std::vector<Calls> all(15, base);
  size_t i = 1;
  all[i++].transfer.slot_expert = other.slot_expert.data();
  all[i++].transfer.plan_digest = 8;
  all[i++].transfer.tag = 4;
  all[i++].transfer.num_segments = 1;
  all[i++].transfer.mode = static_cast<int32_t>(Mode::kDirect);
  all[i++].transfer.bank.index = 1;
  all[i++].transfer.bank.version = 1;
  all[i++].reduction.slot_expert = other.slot_expert.data();
  all[i++].reduction.tag = 4;
  all[i++].reduction.zero = false;
  all[i++].reduction.mode = static_cast<int32_t>(Mode::kDirect);
  all[i++].gathers = true;
  all[i++].reduces_first = true;
  all[i++].before = {transfer};  // its slots hold experts
  CHECK_EQ(i, all.size());
  std::set<uint64_t> digests, later;
  for (const Calls& calls : all) {
    Ledger ledger(group.config()), twin(group.config());
    uint64_t found[2][2] = {};
    for (Ledger* own : {&ledger, &twin}) {
      uint64_t* const digest = found[own == &twin];
      for (const ReplicateArgs& args : calls.before) own->replicate(args);
      if (calls.gathers) own->gather();
      if (calls.reduces_first) own->reduce(calls.reduction);
      own->replicate(calls.transfer);
      digest[0] = (calls.reduces_first ? own->gather() : own->reduce(calls.reduction)).digest;
      digest[1] = own->gather().digest;
    }
    CHECK(found[0][0] == found[1][0] && found[0][1] == found[1][1]);
    CHECK(digests.insert(found[0][0]).second && later.insert(found[0][1]).second);
  }
}

// A rejected call has a number alone.
void check_rejected() {
  const PlanCase c = make_group(2, 2, 1);
  Random random(3);
  const Group group(c, {100}, {}, random);
  const uint64_t digest = group[1].gather().digest;
  CHECK_EQ(group[0].reject(), 1);
  const Prepared next = group[0].gather();
  CHECK_EQ(next.epoch, 2);
  CHECK(next.digest == digest);
}

}  // namespace

int main() {
  check_large();
  check_digests();
  check_rejected();
  Random random(17);
  for (int repeat = 0; repeat < scaled(200); ++repeat) check_calls(random);
  CHECK(num_kept > 0 && num_from_residents > 0 && num_sums > 0);
}
