#include "simulation/cases.hpp"

namespace sim {
namespace {

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

CallSpec gather(const Case& c) { return {.gather = true, .plan = call(c, Mode::kDirect, {}).plan}; }

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

}  // namespace

Case counter_example() {
  Case c = start("counter-example", 3, 2, {3 * kTile});
  c.calls = {call(c, Mode::kPush, {{0, 1}, {0, 2}, {1, 0}, {1, 2}, {2, 0}, {2, 1}})};
  return c;
}

std::vector<Case> exhaustive_cases() {
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

std::vector<Case> named_cases() {
  std::vector<Case> cases = exhaustive_cases();
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
    {
      // A tail in each segment, and one segment of a few bytes.
      Case c = with_calls(start("tails", 3, 1, {2 * kTile + 100, 3}), mode, {{0, 1}, {0, 2}},
                          {{1, 0}, {1, 2}});
      c.name += suffix;
      c.num_workers = 2;
      cases.push_back(c);
    }
    {
      // Rank 1 imports and exports at once; one slot takes from three hubs.
      Case c =
          with_calls(start("chain", 4, 2, {5 * kTile}), mode,
                     {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 0}}, {{1, 0}, {1, 2}, {1, 3}, {2, 1}});
      c.name += suffix;
      c.first_epoch = (uint64_t{1} << 32) + 1;
      c.num_workers = 2;
      cases.push_back(c);
    }
    {
      // Ranks 2 and 3 have nothing to do for two calls and are soon in the third.
      Case c = start("fast ranks", 4, 1, {2 * kTile});
      c.calls = {call(c, mode, {{0, 1}}), call(c, mode, {{1, 0}}),
                 call(c, mode, {{2, 0}, {2, 1}, {2, 3}}), call(c, mode, {{0, 2}, {0, 3}})};
      c.name += suffix;
      cases.push_back(c);
    }
    {
      Case c = start("home gives up on many", 4, 1, {3 * kTile});
      c.calls = {call(c, mode, {{0, 1}, {0, 2}, {0, 3}})};
      c.name += suffix;
      cases.push_back(ending(c, Ending::kImpatient, 0));
    }
    for (const Ending end : {Ending::kStops, Ending::kDies}) {
      Case c = start("one stops", 4, 2, {3 * kTile});
      c.calls = {call(c, mode, {{0, 1}, {0, 2}, {1, 3}}), call(c, mode, {{2, 1}, {2, 3}})};
      c.name += suffix;
      cases.push_back(ending(c, end, 1));
    }
    {
      Case c = with_calls(start("one disagrees", 3, 1, {2 * kTile}), mode, {{0, 1}, {0, 2}},
                          {{1, 0}, {1, 2}});
      c.name += suffix;
      c.other = call(c, mode, {{0, 1}});
      cases.push_back(ending(c, Ending::kDisagrees, 1));
    }
    {
      Case c = with_calls(start("one rejects", 3, 1), mode, {{0, 1}, {0, 2}}, {{1, 0}, {1, 2}});
      c.name += suffix;
      cases.push_back(ending(c, Ending::kRejects, 1, 1));
    }
  }
  return cases;
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
    if (c.segment_bytes.size() > 1 && draw(random, 0, 2) == 0) spec.segments = {1};
    return spec;
  };
  const int32_t calls = draw(random, 1, 4);
  for (int32_t i = 0; i < calls; ++i) c.calls.push_back(draw_call());
  c.ending = static_cast<Ending>(std::max(draw(random, -5, 5), 0));
  c.culprit = draw(random, 0, ranks - 1);
  c.at_call = draw(random, 0, calls - 1);
  while (digest_of(c.other = draw_call()) == digest_of(c.calls[c.at_call])) c.other.segments = {0};
  return c;
}

}  // namespace sim
