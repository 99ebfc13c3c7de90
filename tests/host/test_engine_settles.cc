// When wait() returns false, the failed call is over: none of its workers still reads the caller's
// main weights, which the caller frees or rewrites at once.
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::AbortWord;
using uec::Fault;
using uec::Mode;

constexpr int64_t kPage = 4096;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Rank 0's experts, each in memory of its own, as a caller would hold them.
class Weights {
 public:
  Weights(int32_t num_experts, int64_t bytes) : bytes_(bytes) {
    for (int32_t e = 0; e < num_experts; ++e) {
      expert_.push_back(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)));
      CHECK(expert_.back() != nullptr);
      std::memset(expert_.back(), e, bytes);
    }
  }
  ~Weights() {
    for (uint8_t* expert : expert_) std::free(expert);
  }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  uint8_t* expert(int32_t e) const { return expert_[e]; }
  std::vector<uint64_t> addresses() const {
    std::vector<uint64_t> list;
    for (uint8_t* expert : expert_) list.push_back(reinterpret_cast<uint64_t>(expert));
    return list;
  }
  void rewrite() const {
    for (uint8_t* expert : expert_) std::memset(expert, 0xFF, bytes_);
  }

 private:
  int64_t bytes_;
  std::vector<uint8_t*> expert_;
};

// Ranks 1 and 3 import experts 0 to 2 of rank 0, and rank 2 imports its expert 3. Rank 2 never
// calls, so a worker of rank 0 that has a group of expert 3 waits for it.
struct Scene {
  Scene(int64_t expert_bytes, int64_t tile_bytes, int32_t num_workers, std::vector<int> pipes)
      : weights(std::make_unique<Weights>(4, expert_bytes)),
        ranks(group(), {.segment_bytes = {expert_bytes},
                        .tile_bytes = tile_bytes,
                        .num_workers = num_workers,
                        .peer_pipes = {pipes, {}, {}, {}}}) {}

  static PlanCase group() {
    PlanCase c = make_group(4, 4, 3);
    c.home.assign(4, 0);
    return c;
  }

  uint64_t submit(int32_t rank, bool background) {
    static const std::vector<int32_t> plan{-1, -1, -1, 0, 1, 2, 3, -1, -1, 0, 1, 2};
    const std::vector<uint64_t> main_ptrs =
        rank == 0 ? weights->addresses() : std::vector<uint64_t>(1);
    return ranks.replicate(rank, plan, main_ptrs, Mode::kDirect, background);
  }

  bool rank_has_aborted(int32_t rank) {
    uint8_t* const word = ranks.base(1) + ranks.layout().symmetric.abort(rank);
    return AbortWord{std::atomic_ref(*reinterpret_cast<uint64_t*>(word)).load()}.set();
  }

  std::unique_ptr<Weights> weights;
  Ranks ranks;
};

// ---- copies that are held half-way --------------------------------------------------------------

// Workers that read these pages come to a signal handler, which keeps the first of them until the
// test lets it go on, and opens the page.
struct Hold {
  const Weights* weights = nullptr;
  std::atomic<bool> caught{false}, release{false}, released{false};
} hold;

thread_local bool waits = false;  // the thread of wait() is never the one that is kept

void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr) & -kPage;
  for (int32_t e = 0; e < 3 && hold.weights != nullptr; ++e) {
    if (at != reinterpret_cast<uintptr_t>(hold.weights->expert(e)) + kPage) continue;
    const timespec moment{0, 1'000'000};
    if (!waits && !hold.caught.exchange(true)) {
      while (!hold.release.load()) nanosleep(&moment, nullptr);
      hold.released.store(true);
    }
    while (!hold.caught.load()) nanosleep(&moment, nullptr);  // leave an expert to another worker
    mprotect(reinterpret_cast<void*>(at), kPage, PROT_READ | PROT_WRITE);
    return;
  }
  signal(signal_number, SIG_DFL);  // a fault of the program itself
}

// A worker of rank 0 is in the middle of a copy when rank 2 fails, by its word or by its end.
void check_waits_for_held_copy(bool by_abort, bool background) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  constexpr int64_t kTile = 16 * kPage;
  constexpr int32_t kWorkers = 3;
  Scene scene(kWorkers * kTile, kTile, kWorkers, {-1, -1, ends[0], -1});
  hold.weights = scene.weights.get();
  for (std::atomic<bool>* flag : {&hold.caught, &hold.release, &hold.released}) flag->store(false);
  for (int32_t e = 0; e < 3; ++e)
    CHECK(mprotect(scene.weights->expert(e) + kPage, kPage, PROT_NONE) == 0);

  std::thread caller([&] {
    waits = true;
    CHECK(!scene.ranks.engine(0).wait(scene.submit(0, background)));
    CHECK(hold.released.load());
    scene.weights->rewrite();
    scene.weights.reset();
  });
  std::vector<std::thread> receivers;
  for (const int32_t rank : {1, 3})
    receivers.emplace_back(
        [&, rank] { CHECK(!scene.ranks.engine(rank).wait(scene.submit(rank, false))); });

  while (!hold.caught.load()) sleep_us(100);
  if (by_abort)
    scene.ranks.engine(2).abort();
  else
    close(ends[1]);
  while (!scene.rank_has_aborted(0)) sleep_us(100);
  sleep_us(50'000);  // time to return too early
  hold.release.store(true);
  caller.join();
  for (std::thread& receiver : receivers) receiver.join();
  CHECK(scene.ranks.engine(0).report().fault == (by_abort ? Fault::kAborted : Fault::kGone));
  CHECK_EQ(scene.ranks.engine(0).report().root, 2);
  hold.weights = nullptr;
  if (by_abort) close(ends[1]);
  close(ends[0]);
}

// ---- copies at full speed -----------------------------------------------------------------------

// Any worker may be anywhere when the call fails, by a peer or by ourselves.
void check_free_in_full_flight() {
  Random random(12);
  for (int repeat = 0; repeat < scaled(80); ++repeat) {
    Scene scene(32 * 4096 * draw(random, 1, kSanitized ? 4 : 16), 4096, 1 + repeat % 4, {});
    const bool background = draw(random, 0, 1) == 0;
    const int32_t culprit = draw(random, 0, 3), pause = draw(random, 0, 3000);
    scene.ranks.on_each([&](int32_t rank) {
      if (rank == 2) {
        sleep_us(pause);
        scene.ranks.engine(culprit).abort();
        scene.ranks.engine(2).abort();  // ranks 1 and 3 may have got what they wanted before
        return;
      }
      CHECK(!scene.ranks.engine(rank).wait(scene.submit(rank, background)) || rank != 0);
      if (rank != 0) return;
      scene.weights->rewrite();
      scene.weights.reset();
    });
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a failed call does not end");
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  CHECK(sigaction(SIGSEGV, &action, nullptr) == 0);
  for (const bool by_abort : {true, false})
    for (const bool background : {true, false}) check_waits_for_held_copy(by_abort, background);
  check_free_in_full_flight();
}
