// The exchange of loads by teams of several threads: every row, what a step reports about its
// peers, and which peers nothing is stored to.
#include <atomic>
#include <memory>
#include <vector>

#include "core/transfer/gather.hpp"
#include "core/transfer/team_flags.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using team_tests::agree;
using team_tests::kFirstEpoch;
using team_tests::kSizes;
using team_tests::record_of;
using uec::Call;
using uec::CallRecord;
using uec::Fault;
using uec::FlagKind;
using uec::RecordKind;
using uec::SingleThread;
using uec::Step;

int32_t load_of(uint64_t epoch, int32_t rank, int32_t expert) {
  return static_cast<int32_t>(epoch * 10007 + rank * 101 + expert);
}

// A group in plain memory.
struct World {
  World(int32_t num_ranks, int32_t num_experts)
      : num_ranks(num_ranks), num_experts(num_experts), gone(num_ranks) {
    const PlanCase group = make_group(num_ranks, num_experts, 0);
    layout = uec::SymmetricLayout::make(group.topology(), num_experts, 1, 0, nullptr, nullptr);
    for (int32_t r = 0; r < num_ranks; ++r) {
      memory.emplace_back(uec::ceil_div(layout.total, 8));
      counts.emplace_back(uec::ceil_div(layout.load_base, 8));
      bases.push_back(reinterpret_cast<uint8_t*>(memory[r].data()));
      rows.emplace_back(num_experts);
    }
    involved.assign(num_ranks, 1);
  }

  std::atomic_ref<uint64_t> word(int32_t rank, int64_t offset) {
    return std::atomic_ref(memory[rank][offset / 8]);
  }
  const int32_t* table(int32_t rank) const {
    return reinterpret_cast<const int32_t*>(bases[rank] + layout.load(0, num_experts));
  }
  Call call(int32_t rank, uint64_t epoch) {
    Call made;
    made.rank = rank;
    made.num_ranks = num_ranks;
    made.epoch = {epoch, {record_of(epoch)}};
    made.layout = layout;
    made.addresses.bases = bases.data();
    made.work.involved = involved.data();
    return made;
  }
  void fill_row(int32_t rank, uint64_t epoch) {
    for (int32_t e = 0; e < num_experts; ++e) rows[rank][e] = load_of(epoch, rank, e);
  }

  int32_t num_ranks, num_experts;
  uec::SymmetricLayout layout;
  std::vector<std::vector<uint64_t>> memory;
  std::vector<std::vector<std::atomic<int32_t>>> counts;  // publishes to each flag
  std::vector<uint8_t*> bases;
  std::vector<std::vector<int32_t>> rows;
  std::vector<uint8_t> involved;
  std::vector<std::atomic<bool>> gone;
};

template <class Team>
using TeamMemory = team_tests::FlagMemory<World, Team>;

// What the members of a team share of their mover.
struct Stores {
  std::atomic<int32_t> loads_left{2};  // looks until the row is loaded
  uint32_t commits = 0;
};

// A store happens only when its member waits for its delivery.
template <class Team>
class TeamMover : public uec::DeliveryPolicy {
 public:
  explicit TeamMover(Stores& stores) : stores_(stores) {}

  void fetch(uint32_t, const uec::Stage& stage, const uint8_t* source) {
    bytes_ = stage.span.bytes;
    source_ = source;
  }
  bool loaded(uint32_t) {
    return team_.broadcast(team_.leader() && stores_.loads_left.fetch_sub(1) <= 0);
  }
  void store(uint32_t, uint8_t* destination, int64_t bytes) {
    CHECK_EQ(bytes, bytes_);
    if (destination != nullptr) pending_.push_back(destination);
    team_.sync();
  }
  uint32_t commit_and_wait_source(uint32_t) {
    return team_.broadcast(team_.leader() ? ++stores_.commits : 0);
  }
  template <class F>
  bool wait_delivered(uint32_t ticket, bool may_block, F&& then) {
    if (!team_.broadcast(may_block)) return false;
    if (ticket > 0) {
      for (uint8_t* const to : pending_) std::memcpy(to, source_, bytes_);
      pending_.clear();
    }
    team_.sync();
    then(delivered());
    return true;
  }

 private:
  Stores& stores_;
  Team team_;
  int64_t bytes_ = 0;
  const uint8_t* source_ = nullptr;
  std::vector<uint8_t*> pending_;
};

// What one member runs of a rank's calls.
template <class Team>
struct Steps {
  Steps(World& world, int32_t rank, uint64_t epoch, Stores& stores, uint8_t* sent)
      : call(world.call(rank, epoch)),
        memory(world, rank),
        mover(stores),
        gather(call, memory, mover, world.rows[rank].data(), world.num_experts, sent) {}

  Call call;
  TeamMemory<Team> memory;
  TeamMover<Team> mover;
  uec::Gather<TeamMemory<Team>, TeamMover<Team>> gather;
};

// ---- all ranks at once --------------------------------------------------------------------------

struct Shared {
  std::vector<Stores> stores;
  std::vector<uint8_t> sent;
};

int run_rank(World& world, int32_t rank, int32_t num_calls, Shared& shared) {
  for (int32_t c = 0; c < num_calls; ++c) {
    const uint64_t epoch = kFirstEpoch + c;
    if (Crowd::leader()) world.fill_row(rank, epoch);
    Crowd::sync();
    Steps<Crowd> s(world, rank, epoch, shared.stores[c], shared.sent.data());
    announce_call(s.call, s.memory, s.mover);
    for (;;) {
      const Step step = s.gather.step();
      agree<Crowd>(static_cast<uint64_t>(step));
      CHECK(step != Step::kFailed);
      if (step == Step::kFinished) break;
      if (step == Step::kWaitsForPeer) Fibers::pause();
    }
    // Every member may read the whole table.
    for (int32_t r = 0; r < world.num_ranks; ++r)
      for (int32_t e = Crowd::index(); e < world.num_experts; e += Crowd::size())
        CHECK_EQ(world.table(rank)[r * world.num_experts + e], load_of(epoch, r, e));
    Crowd::sync();
  }
  return 0;
}

void check_all_at_once() {
  Random random(5);
  for (int repeat = 0; repeat < scaled(40) + 2; ++repeat) {
    World world(draw(random, 1, 7), draw(random, 1, 9));
    const int32_t num_calls = 3;
    std::vector<Shared> shared(world.num_ranks);
    Fibers ranks;
    for (int32_t r = 0; r < world.num_ranks; ++r) {
      shared[r].stores = std::vector<Stores>(num_calls);
      shared[r].sent.resize(world.num_ranks);
      const int32_t size = kSizes[(repeat + r) % 4];
      ranks.spawn([&, r, size] {
        Crowd::run(size, [&] { return run_rank(world, r, num_calls, shared[r]); });
      });
    }
    ranks.wait();
    for (int32_t r = 0; r < world.num_ranks; ++r)
      for (int32_t peer = 0; peer < world.num_ranks; ++peer) {
        CHECK_EQ(world.counts[r][world.layout.gathered(peer) / 8].load(), num_calls);
        CHECK_EQ(world.counts[r][world.layout.call(peer) / 8].load(), r == peer ? 0 : num_calls);
      }
  }
}

// ---- what a step reports ------------------------------------------------------------------------

struct Answer {
  Step step = Step::kFinished;
  Fault fault = Fault::kNone;
  uec::Wait wait{};
};

// Runs the exchange of `rank` for as long as it can go.
template <class Team>
Answer answer_of(World& world, int32_t rank, Stores& stores, uint8_t* sent) {
  Team team;
  Steps<Team> s(world, rank, kFirstEpoch, stores, sent);
  Step step;
  do step = s.gather.step();
  while (step == Step::kProgress || step == Step::kAwaitDelivered);
  agree<Team>(static_cast<uint64_t>(step));
  const Answer answer{step, s.gather.fault(), s.gather.wait()};
  agree<Team>(static_cast<uint64_t>(answer.fault));
  agree<Team>(static_cast<uint64_t>(answer.wait.peer));
  agree<Team>(answer.wait.seen);
  while (s.gather.drain_step() != Step::kFinished) {
  }
  team.sync();
  return answer;
}

enum class Trouble { kNone, kMissing, kMismatch, kRejected, kGone, kRowMissing, kBeyond, kNumber };

// Every peer without trouble has called and sent its row.
Answer expect(World& world, int32_t rank, const std::vector<Trouble>& troubles) {
  Answer waits;
  for (int32_t r = 0; r < world.num_ranks; ++r) {
    const Trouble trouble = r == rank ? Trouble::kNone : troubles[r];
    uint64_t record = record_of(kFirstEpoch), row = kFirstEpoch;
    Answer answer{Step::kFailed, Fault::kMismatch, {FlagKind::kCall, r, -1, -1, 0, kFirstEpoch}};
    switch (trouble) {
      case Trouble::kNone:
      case Trouble::kNumber:
        break;
      case Trouble::kMissing:
        record = record_of(kFirstEpoch - 1);
        answer.step = Step::kWaitsForPeer;
        answer.fault = Fault::kNone;
        break;
      case Trouble::kMismatch:
        record = record_of(kFirstEpoch, RecordKind::kCall, 99);
        break;
      case Trouble::kRejected:
        record = record_of(kFirstEpoch, RecordKind::kRejected);
        answer.fault = Fault::kRejected;
        break;
      case Trouble::kGone:
        record = record_of(kFirstEpoch - 1);
        world.gone[r] = true;
        answer.fault = Fault::kGone;
        break;
      case Trouble::kRowMissing:
        row = kFirstEpoch - 1;
        answer.step = Step::kWaitsForPeer;
        answer.fault = Fault::kNone;
        answer.wait.flag = FlagKind::kGathered;
        answer.wait.seen = row;
        break;
      case Trouble::kBeyond:  // it was in another call, and has left it
        record = record_of(kFirstEpoch + 1);
        break;
    }
    if (r != rank) world.word(rank, world.layout.call(r)) = record;
    if (r != rank) world.word(rank, world.layout.gathered(r)) = row;
    if (trouble == Trouble::kNone) continue;
    if (answer.wait.flag == FlagKind::kCall) answer.wait.seen = CallRecord{record}.epoch_low();
    // A fault goes before any wait, a call before any row, and the first rank before others.
    const auto place = [](const Answer& a) {
      return a.step == Step::kFailed ? 0 : a.wait.flag == FlagKind::kCall ? 1 : 2;
    };
    if (waits.step == Step::kFinished || place(answer) < place(waits)) waits = answer;
  }
  return waits;
}

void check_reports() {
  Random random(6);
  for (int repeat = 0; repeat < scaled(150) + 20; ++repeat) {
    const int32_t num_ranks = draw(random, 2, 11), rank = draw(random, 0, num_ranks - 1);
    std::vector<Trouble> troubles(num_ranks, Trouble::kNone);
    const int32_t faulty = draw(random, 0, num_ranks - 1);
    troubles[faulty] = static_cast<Trouble>(draw(random, 1, 6));
    for (int32_t r = 0; r < num_ranks; ++r)  // only one rank has a fault
      if (r != faulty && draw(random, 0, 2) == 0)
        troubles[r] = draw(random, 0, 1) == 0 ? Trouble::kMissing : Trouble::kRowMissing;
    for (int32_t size = 0; size <= 8; ++size) {  // 0: alone
      World world(num_ranks, 5);
      world.fill_row(rank, kFirstEpoch);
      const Answer expected = expect(world, rank, troubles);
      Stores stores;
      std::vector<uint8_t> sent(num_ranks);
      std::vector<Answer> answers;
      if (size == 0)
        answers = {answer_of<SingleThread>(world, rank, stores, sent.data())};
      else
        answers =
            Crowd::run(size, [&] { return answer_of<Crowd>(world, rank, stores, sent.data()); });
      for (const Answer& answer : answers) {
        CHECK(answer.step == expected.step);
        CHECK(answer.fault == expected.fault);
        if (expected.step == Step::kFinished) continue;
        CHECK(answer.wait.flag == expected.wait.flag);
        CHECK_EQ(answer.wait.peer, expected.wait.peer);
        CHECK_EQ(answer.wait.seen, expected.wait.seen);
        CHECK_EQ(answer.wait.expected, kFirstEpoch);
      }
      // Peers that have not called got nothing; a row comes with its flag, unless we failed.
      for (int32_t r = 0; r < num_ranks; ++r) {
        const int32_t flags = world.counts[r][world.layout.gathered(rank) / 8].load();
        const bool here = world.table(r)[rank * 5] == load_of(kFirstEpoch, rank, 0);
        const bool called =
            r == rank || troubles[r] == Trouble::kNone || troubles[r] == Trouble::kRowMissing;
        if (!called) CHECK(!here && flags == 0);
        if (expected.step != Step::kFailed) CHECK(here == called && flags == called);
        CHECK(flags <= here);
      }
    }
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a step does not end: members of a team went different ways?");
  check_reports();
  check_all_at_once();
}
