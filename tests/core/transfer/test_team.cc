// Steps run by a team of several threads: they do and report what a team of one does. The tests of
// tests/device have peers that change flags between the looks of two members.
#include <memory>
#include <utility>
#include <vector>

#include "core/transfer/failure.hpp"
#include "core/transfer/team_world.hpp"
#include "support/check.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace team_tests;

// ---- the same call, step for step ---------------------------------------------------------------

// All ranks make the first call, one step after the other. What both sides of each rank answered.
template <class Team>
std::vector<Fields> make_call(World& world, uint32_t seed) {
  enum Phase { kCall, kOpen, kWork, kFinish, kDone };
  Team team;
  Random random(seed);
  std::vector<Fields> trace(world.num_ranks());
  std::vector<std::unique_ptr<Steps<Team>>> steps;
  std::vector<Phase> phase(world.num_ranks(), kCall);
  for (int32_t r = 0; r < world.num_ranks(); ++r) {
    world.parts[0][r]->call.reset_counters(team);
    if (team.leader()) world.fill_weights(r, kFirstEpoch);
    team.sync();
    steps.push_back(std::make_unique<Steps<Team>>(world, 0, r));
  }
  for (int32_t done = 0, steps_left = 30'000; done < world.num_ranks(); --steps_left) {
    CHECK(steps_left > 0);
    const int32_t r = draw(random, 0, world.num_ranks() - 1);
    const bool fetches = draw(random, 0, 1) == 1;
    Steps<Team>& s = *steps[r];
    team.sync();  // what one rank's members have published is there for all members of the next
    switch (phase[r]) {
      case kCall:
        announce_call(s.part.call, s.memory, s.mover);
        phase[r] = kOpen;
        break;
      case kOpen:
        announce_open(s.part.call, s.memory, s.mover);
        phase[r] = kWork;
        break;
      case kWork: {
        const Step step = fetches ? s.fetcher.step() : s.storer.step();
        fetches ? agree_on<Team>(s.fetcher, step) : agree_on<Team>(s.storer, step);
        trace[r].push_back(static_cast<int64_t>(step) * 2 + fetches);
        if (step == Step::kWaitsForPeer)
          for (const int64_t field : fields_of(s.fetcher.wait())) trace[r].push_back(field);
        CHECK(step != Step::kFailed);
        if (!fetches && step == Step::kFinished) phase[r] = kFinish;
        break;
      }
      case kFinish: {
        const Step step = s.finish.step();
        agree_on<Team>(s.finish, step);
        CHECK(step != Step::kFailed);
        if (step != Step::kFinished) break;
        phase[r] = kDone;
        ++done;
        break;
      }
      case kDone:
        break;
    }
  }
  team.sync();
  for (int32_t r = 0; r < world.num_ranks(); ++r)
    if (team.leader()) world.use_slots(r, 0);
  return trace;
}

void check_same_call() {
  Random random(11);
  int32_t flagged = 0;
  for (int repeat = 0; repeat < (kSanitized ? 6 : 16); ++repeat) {
    PlanCase group = draw_case(random, repeat % 4 == 0 ? 12 : 4);
    const auto mode = static_cast<Mode>(repeat % uec::kNumModes);
    const std::vector<std::vector<int64_t>> payloads{{100}, {3 << 16}, {5, (2 << 16) + 100}};
    auto segments = payloads[draw(random, 0, 2)];
    if (repeat % 6 == 0) {  // enough for every rank to be a hub
      group = make_group(4, 4, 2);
      for (int32_t r = 0; r < 8; ++r) group.place(r / 4, r % 4);
      segments = {6 << 16};
    }
    const auto make_world = [&] {
      auto world = std::make_unique<World>(group, segments, 32 << 10);
      world->add_call(group.slot_expert, mode);
      return world;
    };
    const auto expected = make_world();
    const std::vector<Fields> trace = make_call<SingleThread>(*expected, repeat);
    for (const auto& counts : expected->counts) {
      for (const auto& count : counts) CHECK(count.load() <= 1);
      for (int64_t s = 0; s < group.slots_per_rank; ++s)
        for (int64_t g = 0; g < expected->layout.max_groups; ++g)
          flagged += counts[expected->layout.ready(s, g) / 8].load();
    }
    for (const int32_t size : kSizes) {
      const auto world = make_world();
      for (const auto& own : Crowd::run(size, [&] { return make_call<Crowd>(*world, repeat); }))
        CHECK(own == trace);
      for (int32_t r = 0; r < world->num_ranks(); ++r)
        for (size_t i = 0; i < world->counts[r].size(); ++i)
          CHECK_EQ(world->counts[r][i].load(), expected->counts[r][i].load());
    }
  }
  CHECK(flagged > 0);
}

// ---- what a step reports ------------------------------------------------------------------------

struct Answer {
  Step step = Step::kFinished;
  Fault fault = Fault::kNone;
  Wait wait{};

  bool operator==(const Answer& other) const {
    return step == other.step && fault == other.fault && fields_of(wait) == fields_of(other.wait);
  }
};

struct Outcome {
  Answer fetch, store, finish;
  int32_t aborter, disagrees, early, called;

  bool operator==(const Outcome&) const = default;
};

// Runs a rank's call for as long as it can go, then its wait for peers, and what surrounds them.
template <class Team>
Outcome outcome_of(World& world, int32_t rank) {
  Team team;
  world.parts[0][rank]->call.reset_counters(team);
  Steps<Team> s(world, 0, rank);
  const Call& call = s.part.call;
  Outcome outcome;
  const auto answer = [](auto& side, Step step) {
    agree_on<Team>(side, step);
    const bool waits = step == Step::kWaitsForPeer || step == Step::kFailed;
    return Answer{step, side.fault(), waits ? side.wait() : Wait{}};
  };
  Step fetched = Step::kProgress, stored = Step::kProgress, finished = Step::kProgress;
  do {
    fetched = s.fetcher.step();
    stored = s.storer.step();
    agree<Team>(static_cast<uint64_t>(fetched) * 16 + static_cast<uint64_t>(stored));
  } while ((stored != Step::kNeedsFetch || fetched == Step::kProgress) && stored != Step::kFailed &&
           stored != Step::kFinished && fetched != Step::kFailed);
  outcome.fetch = answer(s.fetcher, fetched);
  outcome.store = answer(s.storer, stored);
  if (fetched == Step::kFailed || stored == Step::kFailed) {
    do {
      s.fetcher.drain_step();
      stored = s.storer.drain_step();
      agree<Team>(static_cast<uint64_t>(stored));
    } while (stored != Step::kFinished);
  }
  do finished = s.finish.step();
  while (finished == Step::kProgress);
  outcome.finish = answer(s.finish, finished);
  outcome.aborter = find_abort(s.memory, call.layout, call.epoch);
  outcome.disagrees = find_disagreement(s.memory, call.layout, {record_of(kFirstEpoch - 1)});
  const uec::Report early =
      check_peers(s.memory, call.layout, call.epoch, {record_of(kFirstEpoch - 1)});
  outcome.early = early.aborter >= 0 ? early.aborter : early.wait.peer;
  outcome.called = all_called(s.memory, call);
  agree<Team>(static_cast<uint64_t>(outcome.aborter));
  agree<Team>(static_cast<uint64_t>(outcome.disagrees));
  agree<Team>(static_cast<uint64_t>(outcome.early));
  agree<Team>(static_cast<uint64_t>(outcome.called));
  announce_abort(call, s.memory, s.mover, AbortWord::make(kFirstEpoch, rank, -1));
  announce_absence(call, s.memory, s.mover, record_of(kFirstEpoch + 1, RecordKind::kClosed));
  team.sync();
  return outcome;
}

// What a wait for peers has to end with. Each member goes through its share in order, and so a
// larger team finds a fault that is farther down the list.
Answer answer_of_finish(World& world, int32_t rank, int32_t team_size) {
  const Call& call = world.parts[0][rank]->call;
  TeamMemory<SingleThread> memory(world, rank);
  std::map<int32_t, Answer> unmet[2];  // waiting, faulty
  for (int32_t member = 0; member < team_size; ++member)
    for (int32_t i = member; i < call.work.num_expected; i += team_size) {
      const uec::Expected& e = call.work.expected[i];
      const bool done = e.kind == uec::Expected::kDone;
      Answer a;
      const uec::FlagState verdict = check_flag(
          memory, done ? call.layout.done(e.idx, e.peer) : call.layout.pulled(e.idx, e.peer),
          call.layout.call(e.peer), e.peer, call.epoch, &a.fault, &a.wait.seen);
      if (verdict == uec::FlagState::kArrived) continue;
      const bool faulty = verdict == uec::FlagState::kFault;
      a.step = faulty ? Step::kFailed : Step::kWaitsForPeer;
      a.wait = {done ? FlagKind::kDone : FlagKind::kPulled,
                e.peer,
                e.expert,
                -1,
                a.wait.seen,
                kFirstEpoch};
      unmet[faulty][i] = a;
      break;
    }
  for (const auto& answers : {unmet[1], unmet[0]})
    if (!answers.empty()) return answers.begin()->second;
  return {};
}

// Everything that `rank` waits for in the first call has arrived.
void show_all(World& world, int32_t rank) {
  const uec::SymmetricLayout& layout = world.layout;
  for (int32_t r = 0; r < world.num_ranks(); ++r) {
    if (r != rank) world.word(rank, layout.call(r)) = record_of(kFirstEpoch);
    world.word(rank, layout.open(r)) = record_of(kFirstEpoch);
    for (int32_t s = 0; s < world.base_case.slots_per_rank; ++s)
      world.word(rank, layout.done(s, r)) = kFirstEpoch;
    for (int32_t m = 0; m < world.num_local_experts[rank]; ++m)
      world.word(rank, layout.pulled(m, r)) = kFirstEpoch;
  }
  for (int32_t s = 0; s < world.base_case.slots_per_rank; ++s)
    for (int64_t g = 0; g < layout.max_groups; ++g)
      world.word(rank, layout.ready(s, g)) = kFirstEpoch;
}

// Makes flags of one peer stale, or gives it an unexpected record.
void spoil(World& world, int32_t rank, int32_t peer, int32_t trouble, Random& random) {
  const uec::SymmetricLayout& layout = world.layout;
  const auto set = [&](int64_t offset, uint64_t value) { world.word(rank, offset) = value; };
  const int32_t slots = world.base_case.slots_per_rank;
  const auto record = [&](uint64_t epoch, RecordKind kind, uint64_t digest = kDigest) {
    if (peer == rank) return;
    set(layout.call(peer), record_of(epoch, kind, digest));
    if (epoch <= kFirstEpoch) set(layout.open(peer), record_of(kFirstEpoch - 1));
  };
  const auto owe = [&] {
    for (int32_t s = 0; s < slots; ++s) set(layout.done(s, peer), kFirstEpoch - 1);
    for (int32_t m = 0; m < world.num_local_experts[rank]; ++m)
      set(layout.pulled(m, peer), kFirstEpoch - 1);
  };
  const auto lack = [&](int64_t first_group) {
    for (int32_t s = 0; s < slots; ++s)
      for (int64_t g = first_group; g < layout.max_groups; ++g)
        set(layout.ready(s, g), kFirstEpoch - 1);
  };
  switch (trouble) {
    case 0:
      return record(kFirstEpoch - 1, RecordKind::kCall);
    case 1:  // the call before this one was another
      return record(kFirstEpoch - 1, RecordKind::kCall, 99);
    case 2:
      return record(kFirstEpoch, RecordKind::kCall, 99);
    case 3:
      return record(kFirstEpoch, RecordKind::kRejected);
    case 4:
      return set(layout.open(peer), record_of(kFirstEpoch - 1));
    case 5:
      return lack(draw(random, 0, 1));
    case 6:
      return owe();
    case 7:
      owe();
      return record(kFirstEpoch + 1, RecordKind::kCall);
    case 8:
      owe();
      world.gone[peer] = true;
      return;
    case 9:
      world.gone[peer] = true;
      return set(layout.open(peer), record_of(kFirstEpoch - 1));
    case 10:
      lack(0);
      world.gone[peer] = true;
      return;
    case 11:
      for (int32_t m = 0; m < world.num_local_experts[rank]; ++m)
        set(layout.pulled(m, peer), kFirstEpoch - 1);
      return;
    default:
      return set(layout.abort(peer), AbortWord::make(kFirstEpoch + trouble - 13, -1, -1).word);
  }
}
// The rarer its effect, the more often it is tried.
constexpr int32_t kTroubles[] = {0, 1, 2, 3,  4,  5,  5,  5,  6,  6,  7,
                                 8, 8, 9, 10, 10, 11, 11, 11, 12, 13, 14};

// The rank that sends most, as a hub above all, or the one that waits for most hubs.
int32_t busiest_rank(const PlanCase& group, Mode mode, bool sends) {
  const Tiles tiles({3 << 16}, 64 << 10);
  int32_t busiest = 0, most = -1;
  for (int32_t r = 0; r < group.num_ranks; ++r) {
    const Part part(group, tiles, mode, r);
    const uec::Worklist& w = part.worklist.list;
    int32_t count = 0;
    for (int32_t p = 0; p < w.num_pieces && sends; ++p)
      count += w.pieces[p].source == uec::Source::kHeld ? 1 : 4;
    for (int32_t i = 0; i < w.num_expected && !sends; ++i)
      count += w.expected[i].kind == uec::Expected::kDone ? 1 : 4;
    if (count <= most) continue;
    busiest = r;
    most = count;
  }
  return busiest;
}

void check_same_reports() {
  Random random(11);
  std::map<FlagKind, int32_t> blocked, failed, unfinished, failed_late;
  for (int repeat = 0; repeat < (kSanitized ? 150 : 600); ++repeat) {
    PlanCase group = draw_case(random, repeat % 4 == 0 ? 12 : 5);
    const auto mode = static_cast<Mode>(repeat % uec::kNumModes);
    const int32_t rank = repeat % 4 == 3 ? draw(random, 0, group.num_ranks - 1)
                                         : busiest_rank(group, mode, repeat % 4 != 2);
    const int32_t seed = draw(random, 0, 1 << 30), troubles = draw(random, 1, 2);
    const auto make_world = [&] {
      auto world = std::make_unique<World>(group, std::vector<int64_t>{3 << 16}, 64 << 10);
      world->add_call(group.slot_expert, mode);
      show_all(*world, rank);
      Random same(seed);
      for (int32_t i = 0; i < troubles; ++i) {
        // The same for several peers, in any order, or for some of them.
        const int32_t trouble = kTroubles[draw(same, 0, std::size(kTroubles) - 1)];
        for (int32_t many = draw(same, 0, 3); many >= 0; --many)
          spoil(*world, rank, draw(same, 0, group.num_ranks - 1), trouble, same);
      }
      return world;
    };
    const auto alone = make_world();
    Outcome expected = outcome_of<SingleThread>(*alone, rank);
    CHECK(expected.finish == answer_of_finish(*alone, rank, 1));
    if (expected.fetch.step == Step::kWaitsForPeer) ++blocked[expected.fetch.wait.flag];
    if (expected.fetch.step == Step::kFailed) ++failed[expected.fetch.wait.flag];
    if (expected.store.step == Step::kFailed) ++failed[FlagKind::kPulled];
    if (expected.finish.step == Step::kWaitsForPeer) ++unfinished[expected.finish.wait.flag];
    if (expected.finish.step == Step::kFailed) ++failed_late[expected.finish.wait.flag];
    const int32_t size = kSizes[draw(random, 0, 4)];
    const auto world = make_world();
    expected.finish = answer_of_finish(*world, rank, size);
    for (const Outcome& own : Crowd::run(size, [&] { return outcome_of<Crowd>(*world, rank); }))
      CHECK(own == expected);
    for (int32_t r = 0; r < group.num_ranks; ++r)
      for (size_t i = 0; i < world->counts[r].size(); ++i)
        CHECK_EQ(world->counts[r][i].load(), alone->counts[r][i].load());
  }
  if (kSanitized) return;  // too few to meet all
  for (const FlagKind flag : {FlagKind::kCall, FlagKind::kOpen, FlagKind::kReady})
    CHECK(blocked[flag] > 0);
  for (const FlagKind flag : {FlagKind::kCall, FlagKind::kReady, FlagKind::kPulled})
    CHECK(failed[flag] > 0);
  for (const FlagKind flag : {FlagKind::kDone, FlagKind::kPulled})
    CHECK(unfinished[flag] > 0 && failed_late[flag] > 0);
}

}  // namespace

int main() {
  const Watchdog watchdog("a step does not end: members of a team went different ways?");
  check_same_call();
  check_same_reports();
}
