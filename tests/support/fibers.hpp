// Threads of a test that take turns on one real thread. One runs until it meets others, waits,
// or gives its turn away, and then any other may. Which one is drawn: a run shows many
// interleavings, and the next run shows the same ones. A switch costs a hundredth of what the
// kernel's costs.
//
// ThreadSanitizer takes fibers for threads, and their turns order nothing.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "support/check.hpp"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// For what fibers of a thread share without order, which is only the order of their turns.
#define UEC_UNSEEN [[gnu::noinline, gnu::no_sanitize("thread"), gnu::no_sanitize("address")]]

// What a sanitizer needs to know about the stack of a fiber, or of the thread itself.
#if defined(__SANITIZE_THREAD__)
class Watched {
 public:
  UEC_UNSEEN void make(uint8_t*, size_t) { fiber_ = __tsan_create_fiber(0); }
  UEC_UNSEEN void unmake() { __tsan_destroy_fiber(fiber_); }
  UEC_UNSEEN void make_of_thread() { fiber_ = __tsan_get_current_fiber(); }
  // What has ended is ordered before all that the thread does then, as by a join.
  UEC_UNSEEN static void leave(Watched&, Watched& to, bool ends) {
    __tsan_switch_to_fiber(to.fiber_, ends ? 0 : __tsan_switch_to_fiber_no_sync);
  }
  UEC_UNSEEN void arrive(Watched* = nullptr) {}
  // A body begins behind what its creator has done.
  UEC_UNSEEN void hand_over() { __tsan_release(this); }
  UEC_UNSEEN void take_over() { __tsan_acquire(this); }

 private:
  void* fiber_ = nullptr;
};
#elif defined(__SANITIZE_ADDRESS__)
class Watched {
 public:
  void make(uint8_t* stack, size_t bytes) { stack_ = stack, bytes_ = bytes; }
  void unmake() { __asan_unpoison_memory_region(stack_, bytes_); }  // for what is mapped there next
  void make_of_thread() {}
  static void leave(Watched& from, Watched& to, bool) {
    __sanitizer_start_switch_fiber(&from.fake_, to.stack_, to.bytes_);
  }
  void arrive(Watched* from = nullptr) {  // `from`: learns where its stack is
    __sanitizer_finish_switch_fiber(fake_, from ? &from->stack_ : nullptr,
                                    from ? &from->bytes_ : nullptr);
  }
  void hand_over() {}
  void take_over() {}

 private:
  void* fake_ = nullptr;
  const void* stack_ = nullptr;
  size_t bytes_ = 0;
};
#else
struct Watched {
  void make(uint8_t*, size_t) {}
  void unmake() {}
  void make_of_thread() {}
  static void leave(Watched&, Watched&, bool) {}
  void arrive(Watched* = nullptr) {}
  void hand_over() {}
  void take_over() {}
};
#endif

class Fiber {
 public:
  enum class State : uint8_t {
    kReady,
    kPaused,  // looks again after the others
    kHeld,    // runs when nothing else can
    kEnded,
  };

  UEC_UNSEEN Fiber() {
    // The lowest page ends the program that needs more.
    void* const memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, kGuard, PROT_NONE) == 0);
    stack_ = static_cast<uint8_t*>(memory);
    context_.watched.make(stack_ + kGuard, kStack);
  }
  ~Fiber() {
    context_.watched.unmake();
    munmap(stack_, kGuard + kStack);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Has the body, which it deletes, to run: behind what the caller has done so far.
  UEC_UNSEEN void begin(std::function<void()>* body) {
    body_ = body;
    state_ = State::kReady;
    context_.watched.hand_over();
  }
  // Runs until it yields. Returns whether it has ended.
  UEC_UNSEEN bool resume() {
    running_ = this;
    thread_.watched.make_of_thread();
    go(thread_, context_, false);
    running_ = nullptr;
    return state_ == State::kEnded;
  }
  UEC_UNSEEN bool has_turn() const {
    if (word_ != nullptr) return word_->load(std::memory_order_relaxed) != value_;
    return state_ == State::kReady;
  }
  UEC_UNSEEN bool is(State state) const { return state_ == state; }
  UEC_UNSEEN void let_go() {
    state_ = State::kReady;
    word_ = nullptr;
  }

  // By the fiber itself. With `word`, for as long as that holds the value; or, if held, no longer
  // than until nothing else runs.
  UEC_UNSEEN void give_turn(State state, const std::atomic<uint32_t>* word = nullptr,
                            uint32_t value = 0) {
    state_ = state;
    word_ = word;
    value_ = value;
    go(context_, thread_, state == State::kEnded);
    let_go();
  }
  UEC_UNSEEN void set_own(void* own) { own_ = own; }
  UEC_UNSEEN void* own() const { return own_; }

  UEC_UNSEEN static Fiber* running() { return running_; }

 private:
  struct Context {
    void* registers[5];  // as __builtin_setjmp() keeps them
    Watched watched;
  };

  static constexpr size_t kGuard = 4096, kStack = 256 << 10;

  UEC_UNSEEN void go(Context& from, Context& to, bool ends) {
    if (__builtin_setjmp(from.registers) == 0) {
      Watched::leave(from.watched, to.watched, ends);
      jump(to);
    }
    from.watched.arrive();
  }
  [[noreturn]] UEC_UNSEEN void jump(Context& to) {
    if (&to == &thread_ || started_) __builtin_longjmp(to.registers, 1);
    started_ = true;
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stack_ + kGuard;
    fresh.uc_stack.ss_size = kStack;
    makecontext(&fresh, &Fiber::start, 0);
    setcontext(&fresh);
    std::abort();
  }
  // Keeps its stack for the next body.
  [[noreturn]] UEC_UNSEEN static void start() {
    Fiber* const self = running();
    self->context_.watched.arrive(&self->thread_.watched);
    for (;;) {
      self->context_.watched.take_over();
      run(self->body_);
      self->give_turn(State::kEnded);
    }
  }
  [[gnu::noinline]] static void run(std::function<void()>* body) {
    (*body)();
    delete body;
  }

  friend class FiberList;

  inline static thread_local Fiber* running_ = nullptr;

  uint8_t* stack_;
  bool started_ = false;
  Context context_, thread_;
  std::function<void()>* body_ = nullptr;
  void* own_ = nullptr;  // what the body keeps of itself
  Fiber* next_ = nullptr;
  State state_ = State::kEnded;
  const std::atomic<uint32_t>* word_ = nullptr;
  uint32_t value_ = 0;
};

// A list that its users take turns at.
class FiberList {
 public:
  UEC_UNSEEN void push(Fiber* fiber) {
    fiber->next_ = first_;
    first_ = fiber;
  }
  UEC_UNSEEN Fiber* pop() {
    Fiber* const fiber = first_;
    if (fiber != nullptr) first_ = fiber->next_;
    return fiber;
  }
  ~FiberList() {
    while (Fiber* const fiber = pop()) delete fiber;
  }

 private:
  Fiber* first_ = nullptr;
};

// The fibers of a thread.
class Turns {
 public:
  UEC_UNSEEN static Turns& here() {
    static thread_local Turns turns;
    return turns;
  }

  // The body is deleted when it has ended.
  UEC_UNSEEN void spawn(std::function<void()>* body) {
    Fiber* fiber = spare_.pop();
    if (fiber == nullptr) fiber = new Fiber;
    fiber->begin(body);
    spawned_.push(fiber);
  }

  // Until all have ended. By the thread itself.
  void run() {
    uint64_t seen = 0;
    for (uint32_t idle = 0; take_spawned();) {
      if (take_turns()) continue;
      // Those that are left look for what others do: fibers that are held, other threads or
      // processes, or the clock.
      const uint64_t now = acted();
      const bool same = now == std::exchange(seen, now);
      if (same && release_one()) continue;
      idle = same ? idle + 1 : 0;
      CHECK(wake_paused() || release_one());  // otherwise they wait for each other
      if (idle > 16)
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      else if (idle > 0)
        std::this_thread::yield();
    }
  }

  // By a fiber: others may see something new.
  UEC_UNSEEN static void act() { ++here().acted_; }

 private:
  UEC_UNSEEN uint64_t acted() const { return acted_; }

  bool take_spawned() {
    while (Fiber* const fiber = spawned_.pop()) live_.push_back(fiber);
    return !live_.empty();
  }

  bool take_turns() {
    bool any = false;
    const size_t n = live_.size(), first = random_() % n;
    size_t ended = 0;
    for (size_t i = 0; i < n; ++i) {
      Fiber*& fiber = live_[(first + i) % n];
      if (!fiber->has_turn()) continue;
      any = true;
      if (!fiber->resume()) continue;
      spare_.push(std::exchange(fiber, nullptr));
      ++ended;
    }
    if (ended != 0) std::erase(live_, nullptr);
    return any;
  }

  bool release_one() {
    std::vector<Fiber*> held;
    for (Fiber* const fiber : live_)
      if (fiber->is(Fiber::State::kHeld)) held.push_back(fiber);
    if (!held.empty()) held[random_() % held.size()]->let_go();
    return !held.empty();
  }

  bool wake_paused() {
    bool any = false;
    for (Fiber* const fiber : live_)
      if (fiber->is(Fiber::State::kPaused)) fiber->let_go(), any = true;
    return any;
  }

  std::minstd_rand random_;
  std::vector<Fiber*> live_;
  FiberList spawned_, spare_;
  uint64_t acted_ = 0;
};

// Fibers that one caller waits for: a thread, which runs them meanwhile, or a fiber.
class Fibers {
 public:
  // Also by one of them.
  void spawn(std::function<void()> body) {
    left_.fetch_add(1, std::memory_order_relaxed);
    Turns::here().spawn(new std::function<void()>([this, body = std::move(body)] {
      body();
      left_.fetch_sub(1, std::memory_order_release);
    }));
  }
  void wait() {
    if (Fiber::running() == nullptr) Turns::here().run();
    while (const uint32_t left = left_.load(std::memory_order_acquire)) await(left_, left);
  }

  // ---- by a fiber -------------------------------------------------------------------------------

  static void yield() { Fiber::running()->give_turn(Fiber::State::kReady); }
  static void pause() { Fiber::running()->give_turn(Fiber::State::kPaused); }
  static void hold() { Fiber::running()->give_turn(Fiber::State::kHeld); }
  // For as long as `word` holds the value.
  static void await(const std::atomic<uint32_t>& word, uint32_t value) {
    Fiber::running()->give_turn(Fiber::State::kReady, &word, value);
  }
  static void await_or_hold(const std::atomic<uint32_t>& word, uint32_t value) {
    Fiber::running()->give_turn(Fiber::State::kHeld, &word, value);
  }

 private:
  std::atomic<uint32_t> left_{0};
};

// Where a number of fibers meet, again and again.
class FiberBarrier {
 public:
  explicit FiberBarrier(int32_t count) : count_(count) {}
  void wait() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    Fibers::await(phase_, phase);
    phase_.load(std::memory_order_acquire);
  }

 private:
  const int32_t count_;
  std::atomic<int32_t> arrived_{0};
  std::atomic<uint32_t> phase_{0};
};
