#include "simulation/cases.hpp"

namespace sim {
namespace {

using uec::GradType;
using uec::Mode;

constexpr int64_t kTile = 64 << 10;

// Ranks with one expert each, expert r at rank r.
Case start(const char* name, int32_t ranks, int32_t slots,
           std::vector<int64_t> segments = {kTile}) {
  Case c;
  c.name = name;
  c.group = make_group(ranks, ranks, slots);
  c.segment_bytes = std::move(segments);
  return c;
}

using Replica = std::pair<int32_t, int32_t>;  // expert, rank

CallSpec call(const Case& c, Mode mode, const std::vector<Replica>& replicas) {
  PlanCase group = c.group;
  group.clear();
  for (const auto& [expert, rank] : replicas) CHECK(group.place(expert, rank));
  return {.mode = mode, .plan = group.slot_expert};
}

CallSpec banked(const Case& c, Mode mode, uint64_t version, const std::vector<Replica>& replicas) {
  CallSpec spec = call(c, mode, replicas);
  spec.banked = true;
  spec.version = version;
  return spec;
}

CallSpec gather(const Case& c) { return {.gather = true, .plan = call(c, Mode::kDirect, {}).plan}; }

enum class After { kKept, kCleared };  // slot gradients

CallSpec reduction(const Case& c, Mode mode, After after, const std::vector<Replica>& replicas) {
  CallSpec spec = call(c, mode, replicas);
  spec.reduce = true;
  spec.zero = after == After::kCleared;
  return spec;
}

// The same types in slots and main gradients; bytes are those in a slot.
Case with_grads(Case c, GradType type, std::vector<int64_t> bytes = {kTile}) {
  c.grad_bytes = std::move(bytes);
  c.grad_type.assign(c.grad_bytes.size(), type);
  c.main_grad_type = c.grad_type;
  return c;
}

Case with_calls(Case c, Mode mode, const std::vector<Replica>& first,
                const std::vector<Replica>& second) {
  c.calls = {call(c, mode, first), call(c, mode, second)};
  return c;
}

Case ending(Case c, Ending ending, int32_t culprit, int32_t at_call = 0) {
  c.ending = ending;
  c.culprit = culprit;
  c.at_call = at_call;
  return c;
}

// The same turned round: ranks that take a home's piece in hand, and wait for its sums, never add
// up what the others wait for.
Case reduction_counter_example() {
  Case c = with_grads(start("counter-example of sums", 3, 2), GradType::kFloat32, {3 * kTile});
  c.calls = {
      reduction(c, Mode::kPull, After::kCleared, {{0, 1}, {0, 2}, {1, 0}, {1, 2}, {2, 0}, {2, 1}})};
  return c;
}

// Each rank holds the home piece of its own expert and hub pieces of the others', with one worker:
// ranks that take a hub piece in hand and wait for it never send what the others wait for.
Case counter_example() {
  Case c = start("counter-example", 3, 2, {3 * kTile});
  c.calls = {call(c, Mode::kPush, {{0, 1}, {0, 2}, {1, 0}, {1, 2}, {2, 0}, {2, 1}})};
  return c;
}

std::vector<Case> exhaustive_transfers() {
  std::vector<Case> cases;
  // One replica, and another one back in the next call.
  cases.push_back(with_calls(start("pair", 2, 1), Mode::kDirect, {{0, 1}}, {{1, 0}}));
  // A hub that forwards from its slot, and two that share a home's weights.
  for (const Mode mode : {Mode::kPush, Mode::kPull}) {
    const bool push = mode == Mode::kPush;
    Case c = start(push ? "hub, push" : "hubs, pull", 3, 1, {push ? kTile : 2 * kTile});
    c.calls = {call(c, mode, {{0, 1}, {0, 2}})};
    c.opened = true;
    cases.push_back(c);
    c.name += ", the hub stops";
    if (push) cases.push_back(ending(c, Ending::kStops, 1));
  }
  {
    Case c = start("exchange of loads", 2, 1);
    c.calls = {gather(c), gather(c)};
    cases.push_back(c);
  }
  {
    Case c = start("pair, the home stops", 2, 1);
    c.calls = {call(c, Mode::kDirect, {{0, 1}})};
    cases.push_back(ending(c, Ending::kStops, 0));
    c.name = "pair, the replica's rank dies";
    cases.push_back(ending(c, Ending::kDies, 1));
  }
  {
    Case c = with_calls(start("pair, one disagrees", 2, 1), Mode::kDirect, {{0, 1}}, {{1, 0}});
    c.other = call(c, Mode::kDirect, {{1, 0}});
    cases.push_back(ending(c, Ending::kDisagrees, 1));
  }
  return cases;
}

std::vector<Case> exhaustive_reductions() {
  std::vector<Case> cases;
  {
    // The home reads the replica itself, and another one back in the next call.
    Case c = with_grads(start("sum of one", 2, 1), GradType::kBFloat16);
    c.calls = {reduction(c, Mode::kPull, After::kCleared, {{0, 1}}),
               reduction(c, Mode::kDirect, After::kKept, {{1, 0}})};
    cases.push_back(c);
    c.name = "sum of one, one clears";
    c.calls.pop_back();
    c.other = reduction(c, Mode::kPull, After::kKept, {{0, 1}});
    cases.push_back(ending(c, Ending::kDisagrees, 1));
    c.name = "sum of one, the home stops";
    cases.push_back(ending(c, Ending::kStops, 0));
    c.name = "sum of one, the replica's rank dies";
    cases.push_back(ending(c, Ending::kDies, 1));
    // It has its slots back, and the home may still load them.
    c.name = "sum of one, the replica's rank gives up";
    cases.push_back(ending(c, Ending::kImpatient, 1));
  }
  for (const GradType type : {GradType::kFloat32, GradType::kBFloat16}) {
    // Both replicas are hubs, with a group each; or one of them is, and slots are cleared.
    const bool apart = type == GradType::kBFloat16;
    Case c = with_grads(start(apart ? "a hub, sums apart" : "two hubs", 3, 1), type,
                        {(apart ? 1 : 2) * kTile});
    c.opened = true;
    c.calls = {reduction(c, Mode::kPull, apart ? After::kCleared : After::kKept, {{0, 1}, {0, 2}})};
    cases.push_back(c);
    c.name += ", it stops";
    c.calls[0].zero = false;
    if (apart) cases.push_back(ending(c, Ending::kStops, 2));
  }
  return cases;
}

std::vector<Case> named_reductions() {
  std::vector<Case> cases = exhaustive_reductions();
  cases.insert(cases.begin(), reduction_counter_example());
  for (const GradType type : {GradType::kFloat32, GradType::kBFloat16})
    for (const Mode mode : {Mode::kPull, Mode::kDirect}) {
      const bool apart = type == GradType::kBFloat16, pull = mode == Mode::kPull;
      const After after = apart == pull ? After::kCleared : After::kKept;
      const After other = apart == pull ? After::kKept : After::kCleared;
      const std::string suffix =
          std::string(apart ? ", bf16" : ", fp32") + (pull ? ", pull" : ", direct");
      const auto add = [&](Case c) {
        c.name += suffix;
        cases.push_back(std::move(c));
      };
      {
        // The main gradient of expert 0 has other hubs in every call, and rank 3 nothing to wait
        // for in the first two.
        Case c = with_grads(start("hubs change", 4, 1), type, {4 * kTile});
        c.calls = {reduction(c, mode, after, {{0, 1}, {0, 2}}),
                   reduction(c, mode, other, {{1, 0}, {1, 2}}),
                   reduction(c, mode, other, {{0, 2}, {0, 3}}),
                   reduction(c, mode, after, {{0, 1}, {0, 3}, {2, 0}})};
        c.first_epoch = (uint64_t{1} << 32) + 1;
        add(c);
      }
      {
        // Slots that a transfer has filled, gradients of the same plan, and an exchange of loads.
        // Rank 1 has the sums of two slots; workers share ranges of several groups.
        Case c = with_grads(start("mixed calls", 4, 2, {2 * kTile}), type, {6 * kTile});
        c.num_workers = 2;
        const std::vector<Replica> first{{0, 1}, {0, 2}, {2, 1}, {2, 0}}, second{{0, 3}, {0, 1}};
        c.calls = {call(c, Mode::kPush, first), reduction(c, mode, after, first), gather(c),
                   reduction(c, mode, other, second), call(c, Mode::kPull, second)};
        add(c);
      }
      {
        Case c = with_grads(start("a slot's owner gives up", 4, 1), type, {3 * kTile});
        c.calls = {reduction(c, mode, after, {{0, 1}, {0, 2}, {0, 3}})};
        add(ending(c, Ending::kImpatient, 2));
      }
      for (const Ending end : {Ending::kStops, Ending::kDies}) {
        Case c = with_grads(start("one stops in sums", 4, 2), type, {3 * kTile});
        c.calls = {reduction(c, mode, after, {{0, 1}, {0, 2}, {1, 3}, {1, 0}}),
                   reduction(c, mode, other, {{2, 1}, {2, 3}})};
        add(ending(c, end, 1));
      }
      {
        // One copies experts while the others reduce their gradients.
        Case c = with_grads(start("one copies", 3, 1, {2 * kTile}), type, {2 * kTile});
        c.calls = {reduction(c, mode, after, {{0, 1}, {0, 2}}),
                   reduction(c, mode, other, {{1, 0}, {1, 2}})};
        c.other = call(c, Mode::kDirect, {{0, 1}, {0, 2}});
        add(ending(c, Ending::kDisagrees, 1));
        c.name = "one sums otherwise";
        c.other = reduction(c, pull ? Mode::kDirect : Mode::kPull, after, {{0, 1}, {0, 2}});
        add(ending(c, Ending::kDisagrees, 0));
      }
    }
  return cases;
}

std::vector<Case> named_transfers() {
  std::vector<Case> cases = exhaustive_transfers();
  cases.insert(cases.begin(), counter_example());
  {
    // Rank 1 never calls; rank 2 has its replica from one worker, and is past the call when the
    // other looks again.
    Case c;
    c.name = "overtaken";
    c.group = make_group(3, 6, 1);
    c.segment_bytes = {kTile};
    c.num_workers = 2;
    c.calls = {call(c, Mode::kDirect, {{0, 1}, {1, 2}}), call(c, Mode::kDirect, {})};
    cases.push_back(ending(c, Ending::kStops, 1));
  }
  {
    // A failed home has its weights back, and its only hub may still load them.
    Case c = start("home gives up", 3, 1);
    c.calls = {call(c, Mode::kPull, {{0, 1}, {0, 2}})};
    cases.push_back(ending(c, Ending::kImpatient, 0));
  }
  for (const Mode mode : {Mode::kPush, Mode::kPull, Mode::kDirect}) {
    const std::string suffix = mode == Mode::kPush   ? ", push"
                               : mode == Mode::kPull ? ", pull"
                                                     : ", direct";
    for (const Ending end : {Ending::kStops, Ending::kDies}) {
      Case c = start("one stops", 4, 2, {3 * kTile});
      c.calls = {call(c, mode, {{0, 1}, {0, 2}, {1, 3}}), call(c, mode, {{2, 1}, {2, 3}})};
      c.name += suffix;
      cases.push_back(ending(c, end, 1));
    }
  }
  return cases;
}

// Slots keep what they hold, and send it.
std::vector<Case> named_banks() {
  std::vector<Case> cases;
  for (const Mode mode : {Mode::kPush, Mode::kPull, Mode::kDirect}) {
    const std::string suffix = mode == Mode::kPush   ? ", push"
                               : mode == Mode::kPull ? ", pull"
                                                     : ", direct";
    Case start;
    start.group = make_group(4, 8, 2);  // experts 2 r and 2 r + 1 at rank r
    start.segment_bytes = {2 * kTile};
    const auto add = [&](Case c, const char* name) {
      c.name = name + suffix;
      cases.push_back(std::move(c));
    };
    {
      // What is to be filled with another expert cannot be sent from, though rank 1 is idle.
      Case c = start;
      c.calls = {banked(c, mode, 1, {{0, 1}, {0, 3}}),
                 banked(c, mode, 1, {{4, 1}, {0, 3}, {0, 2}, {1, 2}, {6, 0}}),
                 banked(c, mode, 1, {})};
      add(c, "a resident gives way");
    }
    {
      // One rank takes its slots to hold nothing. It has nothing to send by the others' tables.
      Case c = start;
      c.calls = {banked(c, mode, 1, {{0, 1}, {0, 2}}),
                 banked(c, mode, 1, {{0, 1}, {0, 2}, {0, 3}, {1, 2}})};
      c.other = c.calls[1];
      c.other.version = 2;
      add(ending(c, Ending::kDisagrees, 2, 1), "one rank has other weights");
    }
    for (const Ending end : {Ending::kStops, Ending::kImpatient}) {
      Case c = start;
      c.calls = {banked(c, mode, 1, {{0, 1}}),
                 banked(c, mode, 1, {{0, 1}, {0, 2}, {0, 3}, {1, 2}})};
      add(ending(c, end, 1, 1), "a resident's rank stops");
    }
  }
  return cases;
}

std::vector<Case> both(std::vector<Case> first, const std::vector<Case>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Turns a case's transfers into those of a bank: each has much in common with the one before.
void fill_bank(Case& c, Random& random) {
  PlanCase planned = c.group;
  planned.clear();
  uint64_t version = 0;
  const auto next = [&](CallSpec& spec) {
    if (spec.gather || spec.reduce || !spec.segments.empty()) return;
    for (int32_t& expert : planned.slot_expert)
      if (draw(random, 0, 3) == 0) expert = -1;
    for (int32_t i = draw(random, 0, 4); i > 0; --i)
      planned.place(draw(random, 0, c.group.num_experts - 1),
                    draw(random, 0, c.group.num_ranks - 1));
    version += draw(random, 0, 4) == 0;
    spec.plan = planned.slot_expert;
    spec.banked = true;
    spec.version = version;
  };
  for (CallSpec& spec : c.calls) next(spec);
  CallSpec& given = c.calls[c.at_call];
  if (draw(random, 0, 1) == 0 || !given.banked) return;
  c.other = given;  // except for its version
  c.other.version = version + 1;
}

}  // namespace

std::vector<Case> exhaustive_cases() {
  return both(exhaustive_transfers(), exhaustive_reductions());
}

std::vector<Case> named_cases() {
  return both(both(named_transfers(), named_banks()), named_reductions());
}

Case draw_case(Random& random) {
  Case c;
  c.name = "random";
  const int32_t ranks = draw(random, 2, 5);
  c.group = make_group(ranks, draw(random, 1, 2 * ranks), draw(random, 0, 8) / 3);
  if (draw(random, 0, 2) == 0)
    for (int32_t& home : c.group.home) home = draw(random, 0, ranks - 1);
  const std::vector<std::vector<int64_t>> payloads{
      {kTile}, {1, 3}, {2 * kTile + 100}, {kTile - 1, 2 * kTile + 1}, {5 * kTile}};
  c.segment_bytes = payloads[draw(random, 0, 4)];
  c.tile_bytes = draw(random, 0, 2) == 0 ? kTile / 2 : kTile;
  const bool grads = draw(random, 0, 1) == 1;
  for (size_t i = 0; i < c.segment_bytes.size() && grads; ++i) {
    const auto draw_type = [&] { return static_cast<GradType>(draw(random, 0, 1)); };
    c.grad_bytes.push_back(uec::round_up(c.segment_bytes[i], 4));
    c.grad_type.push_back(draw_type());
    c.main_grad_type.push_back(draw_type());
  }
  c.num_workers = draw(random, 1, 3);
  const uint64_t epochs[] = {
      1, 2, uint64_t{1} << 31, (uint64_t{1} << 32) - 2, (uint64_t{1} << 32) + 1, uint64_t{1} << 40};
  c.first_epoch = epochs[draw(random, 0, 5)];
  c.eager_delivery = draw(random, 0, 1) == 1;
  const auto draw_call = [&] {
    PlanCase planned = c.group;
    draw_plan(planned, random);
    CallSpec spec{.gather = draw(random, 0, 5) == 0,
                  .mode = static_cast<Mode>(draw(random, 0, 2)),
                  .plan = planned.slot_expert};
    if (spec.gather) spec.plan.assign(spec.plan.size(), -1);
    if (grads && !spec.gather && draw(random, 0, 2) != 0) {
      spec.reduce = true;
      spec.zero = draw(random, 0, 1) == 1;
      spec.mode = draw(random, 0, 3) == 0 ? Mode::kDirect : Mode::kPull;
    } else if (c.segment_bytes.size() > 1 && draw(random, 0, 2) == 0) {
      spec.segments = {1};
    }
    return spec;
  };
  const int32_t calls = draw(random, 1, 4);
  for (int32_t i = 0; i < calls; ++i) c.calls.push_back(draw_call());
  c.ending = static_cast<Ending>(std::max(draw(random, -5, 5), 0));
  c.culprit = draw(random, 0, ranks - 1);
  c.at_call = draw(random, 0, calls - 1);
  do {
    c.other = draw_call();
  } while (digest_of(c.other) == digest_of(c.calls[c.at_call]));
  if (draw(random, 0, 2) == 0) fill_bank(c, random);
  if (draw(random, 0, 2) == 0) {
    for (int32_t& domain : c.group.domain) domain = draw(random, 0, 2);
    c.group.allow_cross_domain = true;
  }
  return c;
}

}  // namespace sim
