// Each primitive of ptx.cuh alone: a block or a few that use it and check what came of it; then
// what each costs.
//
// probes.py launches them, on a GPU or on the machine of tests/ptx. `rounds` says how often.
#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace {

using namespace uec;

struct Results {
  uint64_t wrong, ended;  // ended: threads. A kernel that did nothing has not passed.
  uint64_t values[62];    // of a measurement: cycles, of how many
};

#define UEC_PROBE(name) \
  extern "C" __global__ void name(Results* r, uint8_t* memory, uint64_t* host, int64_t rounds)

constexpr int32_t kTileBytes = 32768, kTileWords = kTileBytes / 4;
constexpr int32_t kSmallBytes = 4096, kSmallWords = kSmallBytes / 4;
constexpr uint64_t kLimitNs = 2'000'000'000;

extern __shared__ __align__(128) uint8_t dynamic[];

__device__ uint32_t pattern(int32_t i, int32_t epoch) {
  return (static_cast<uint32_t>(i) + 1) * 2654435761u ^ static_cast<uint32_t>(epoch) * 40503u;
}
__device__ void expect(Results* r, bool right) {
  if (!right) ptx::add_relaxed(&r->wrong, 1);
}
__device__ void end(Results* r) { ptx::add_relaxed(&r->ended, 1); }

// Whether it became true before the limit; else that is wrong.
template <class IsTrue>
__device__ bool await(Results* r, const IsTrue& is_true) {
  const uint64_t until = ptx::nanoseconds() + kLimitNs;
  while (!is_true()) {
    if (ptx::nanoseconds() > until) {
      expect(r, false);
      return false;
    }
  }
  return true;
}
template <class Do>
__device__ void each_word(int32_t words, const Do& act) {
  for (int32_t i = ptx::thread_idx(); i < words; i += ptx::num_threads()) act(i);
}
__device__ void fill(void* to, int32_t words, int32_t epoch) {
  each_word(words, [&](int32_t i) { static_cast<uint32_t*>(to)[i] = pattern(i, epoch); });
}
__device__ void check(Results* r, const void* from, int32_t words, int32_t epoch) {
  each_word(words, [&](int32_t i) {
    expect(r, static_cast<const volatile uint32_t*>(from)[i] == pattern(i, epoch));
  });
}
// By one thread; a block barrier follows.
__device__ void init_barriers(uint64_t* barriers, int32_t count, uint32_t arrivals) {
  for (int32_t i = 0; i < count; ++i) ptx::mbarrier_init(barriers + i, arrivals);
  ptx::fence_mbarrier_init();
}
__device__ void load(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                     bool once = false) {
  ptx::mbarrier_arrive_expect(barrier, bytes);
  ptx::bulk_load(to, from, bytes, barrier, once);
}
__device__ uint64_t* barriers_at(int32_t offset) {
  return reinterpret_cast<uint64_t*>(dynamic + offset);
}

}  // namespace

// ---- bulk copies and mbarriers ------------------------------------------------------------------

UEC_PROBE(check_bulk_load) {
  uint64_t* const barrier = barriers_at(kTileBytes);
  fill(memory, kTileWords, 1);
  ptx::fence_proxy_async_global();
  if (ptx::thread_idx() == 0) init_barriers(barrier, 1, 1);
  ptx::sync_block();
  if (ptx::thread_idx() == 0) load(dynamic, memory, kTileBytes, barrier, true);
  if (await(r, [&] { return ptx::mbarrier_test(barrier, 0); })) check(r, dynamic, kTileWords, 1);
  end(r);
}

UEC_PROBE(check_bulk_store) {
  fill(dynamic, kTileWords, 2);
  ptx::fence_proxy_async_shared();
  ptx::sync_block();
  if (ptx::thread_idx() == 0) {
    ptx::bulk_store(memory, dynamic, kTileBytes);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async_global();
  }
  ptx::sync_block();
  check(r, memory, kTileWords, 2);
  end(r);
}

// One buffer, filled again as soon as the store before has read it.
UEC_PROBE(check_buffer_reuse) {
  for (int32_t t = 0; t < rounds; ++t) {
    fill(dynamic, kSmallWords, t);
    ptx::fence_proxy_async_shared();
    ptx::sync_block();
    if (ptx::thread_idx() == 0) {
      ptx::bulk_store(memory + t * kSmallBytes, dynamic, kSmallBytes);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ptx::sync_block();
  }
  if (ptx::thread_idx() == 0) {
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async_global();
  }
  ptx::sync_block();
  for (int32_t t = 0; t < rounds; ++t) check(r, memory + t * kSmallBytes, kSmallWords, t);
  end(r);
}

// Two buffers in turns, so that each barrier goes through many phases.
UEC_PROBE(check_mbarrier_phases) {
  uint64_t* const full = barriers_at(2 * kSmallBytes);
  uint64_t* const empty = full + 2;
  for (int32_t t = 0; t < rounds; ++t) fill(memory + t * kSmallBytes, kSmallWords, t);
  ptx::fence_proxy_async_global();
  if (ptx::thread_idx() == 0) {
    init_barriers(full, 2, 1);
    init_barriers(empty, 2, ptx::num_threads());
  }
  ptx::sync_block();
  for (int32_t t = 0; t < rounds; ++t) {
    const int32_t stage = t % 2, turn = t / 2;
    uint8_t* const buffer = dynamic + stage * kSmallBytes;
    if (ptx::thread_idx() == 0) {
      if (turn > 0) await(r, [&] { return ptx::mbarrier_test(empty + stage, (turn - 1) & 1); });
      load(buffer, memory + t * kSmallBytes, kSmallBytes, full + stage);
    }
    if (await(r, [&] { return ptx::mbarrier_test(full + stage, turn & 1); }))
      check(r, buffer, kSmallWords, t);
    ptx::fence_proxy_async_shared();  // reads here come before the next copy's writes
    ptx::mbarrier_arrive(empty + stage);
  }
  end(r);
}

// ---- release and acquire between two blocks of a launch -----------------------------------------

namespace {

// Block 0 writes and publishes, block 1 observes and reads, in turns.
template <class Publish, class Observe>
__device__ void messages(Results* r, uint64_t* flags, uint32_t* words, int64_t rounds,
                         const Publish& publish, const Observe& observe) {
  const int32_t me = ptx::block_x(), lane = ptx::thread_idx();
  for (uint64_t t = 1; t <= static_cast<uint64_t>(rounds); ++t) {
    const auto epoch = static_cast<int32_t>(t);
    if (me == 0) {
      words[lane] = pattern(lane, epoch);
      ptx::sync_warp();
      if (lane == 0) publish(flags, t);
    }
    bool seen = true;
    uint64_t* const theirs = flags + (me == 0 ? 16 : 0);
    if (lane == 0) seen = await(r, [&] { return observe(theirs) >= t; });
    if (ptx::ballot(seen) != ptx::kAllLanes) break;
    ptx::sync_warp();
    if (me == 1) {
      expect(r, words[lane] == pattern(lane, epoch));
      ptx::sync_warp();
      if (lane == 0) publish(flags + 16, t);
    }
  }
  end(r);
}

}  // namespace

UEC_PROBE(check_message_device) {
  messages(
      r, reinterpret_cast<uint64_t*>(memory), reinterpret_cast<uint32_t*>(memory + 512), rounds,
      [](uint64_t* at, uint64_t value) { ptx::store_release_device(at, value); },
      [](const uint64_t* at) { return ptx::load_acquire_device(at); });
}
UEC_PROBE(check_message_system) {
  messages(
      r, reinterpret_cast<uint64_t*>(memory), reinterpret_cast<uint32_t*>(memory + 512), rounds,
      [](uint64_t* at, uint64_t value) { ptx::store_release_system(at, value); },
      [](const uint64_t* at) { return ptx::load_acquire_system(at); });
}
// Released by a fence ahead of a relaxed store.
UEC_PROBE(check_message_fenced) {
  messages(
      r, reinterpret_cast<uint64_t*>(memory), reinterpret_cast<uint32_t*>(memory + 512), rounds,
      [](uint64_t* at, uint64_t value) {
        ptx::fence_release_system();
        ptx::store_relaxed_system(at, value);
      },
      [](const uint64_t* at) { return ptx::load_acquire_system(at); });
}
// Through memory of the host.
UEC_PROBE(check_message_host) {
  messages(
      r, host, reinterpret_cast<uint32_t*>(host + 64), rounds,
      [](uint64_t* at, uint64_t value) { ptx::store_release_system(at, value); },
      [](const uint64_t* at) { return ptx::load_acquire_system(at); });
}

// What a transfer does: a tile by bulk copies to where another block takes it from by a bulk copy.
UEC_PROBE(check_relay) {
  uint64_t* const barrier = barriers_at(kTileBytes);
  auto* const flag = reinterpret_cast<uint64_t*>(memory + 2 * kTileBytes);
  const bool sends = ptx::block_x() == 0;
  if (sends) fill(memory, kTileWords, 3);
  ptx::fence_proxy_async_global();
  if (ptx::thread_idx() == 0) init_barriers(barrier, 1, 1);
  ptx::sync_block();
  if (ptx::thread_idx() == 0) {
    if (!sends && await(r, [&] { return ptx::load_acquire_system(flag) == 1; }))
      ptx::fence_proxy_async_global();
    load(dynamic, memory + (sends ? 0 : kTileBytes), kTileBytes, barrier);
    if (sends && await(r, [&] { return ptx::mbarrier_test(barrier, 0); })) {
      ptx::bulk_store(memory + kTileBytes, dynamic, kTileBytes);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::store_release_system(flag, 1);
    }
  }
  if (await(r, [&] { return ptx::mbarrier_test(barrier, 0); })) check(r, dynamic, kTileWords, 3);
  end(r);
}

// Each block stores to its word and reads the other's: not both may find nothing.
UEC_PROBE(check_fence_system) {
  auto* const words = reinterpret_cast<uint64_t*>(memory);
  auto* const met = reinterpret_cast<int32_t*>(words + 4 * rounds);
  const int32_t me = ptx::block_x();
  const auto meet = [&](int64_t times) {
    ptx::fetch_add_acq_rel(met, 1);
    return await(r, [&] { return ptx::fetch_add_acq_rel(met, 0) >= 2 * times; });
  };
  for (int64_t t = 0; t < rounds && meet(t + 1); ++t) {
    ptx::store_release_system(words + 4 * t + me, 1);
    ptx::fence_system();
    words[4 * t + 2 + me] = ptx::load_acquire_system(words + 4 * t + 1 - me);
  }
  if (meet(rounds + 1) && me == 0)
    for (int64_t t = 0; t < rounds; ++t) expect(r, words[4 * t + 2] + words[4 * t + 3] > 0);
  end(r);
}

// ---- atomics ------------------------------------------------------------------------------------

// A look and a compare-and-swap for each claim: every one is won once.
UEC_PROBE(check_claims) {
  auto* const next = reinterpret_cast<int32_t*>(memory);
  int32_t* const won = next + 32;
  int32_t* const ended = next + 1;
  const auto claims = static_cast<int32_t>(rounds);
  for (int32_t seen; (seen = ptx::load_relaxed(next)) < claims;)
    if (ptx::compare_swap_relaxed(next, seen, seen + 1) == seen)
      ptx::fetch_add_relaxed(won + seen, 1);
  const int32_t all = ptx::num_threads() * ptx::num_blocks_x();
  if (ptx::fetch_add_acq_rel(ended, 1) == all - 1)
    for (int32_t i = 0; i < claims; ++i) expect(r, ptx::load_relaxed(won + i) == 1);
  end(r);
}

// All threads on the same words. The last to arrive sees what all stored before.
UEC_PROBE(check_atomics) {
  auto* const words = reinterpret_cast<int32_t*>(memory);
  auto* const wide = reinterpret_cast<uint64_t*>(memory + 256);
  auto* const stored = reinterpret_cast<uint32_t*>(memory + 512);
  const int32_t all = ptx::num_threads() * ptx::num_blocks_x();
  const int32_t block = ptx::block_y() * ptx::num_blocks_x() + ptx::block_x();
  const int32_t me = block * ptx::num_threads() + ptx::thread_idx();
  const int32_t before = ptx::fetch_add_relaxed(words, 1);
  expect(r, before >= 0 && before < all);
  ptx::add_relaxed(words + 1, me);
  ptx::add_relaxed(wide, uint64_t{1} << 32);
  ptx::max_relaxed(wide + 1, static_cast<uint64_t>(me) << 32);
  expect(r,
         ptx::fetch_max_relaxed(wide + 2, static_cast<uint64_t>(me)) < static_cast<uint64_t>(all));
  stored[me] = pattern(me, 4);
  if (ptx::fetch_add_acq_rel(words + 2, 1) == all - 1) {
    expect(r, words[0] == all && words[1] == all * (all - 1) / 2);
    expect(r, wide[0] == static_cast<uint64_t>(all) << 32);
    expect(r, wide[1] == static_cast<uint64_t>(all - 1) << 32);
    expect(r, wide[2] == static_cast<uint64_t>(all - 1));
    for (int32_t i = 0; i < all; ++i) expect(r, stored[i] == pattern(i, 4));
  }
  end(r);
}

UEC_PROBE(check_in_block) {
  auto* const words = reinterpret_cast<int32_t*>(dynamic);
  auto* const wide = reinterpret_cast<int64_t*>(dynamic + 64);
  uint8_t* const marks = dynamic + 128;
  const int32_t me = ptx::thread_idx(), all = ptx::num_threads();
  if (me < 16) words[me] = me == 3 ? all : 0;
  if (me < 2) wide[me] = 0;
  marks[me] = 0;
  ptx::sync_block();
  ptx::add_shared_relaxed(words, 3);
  expect(r, ptx::fetch_add_in_block(words + 1, 1) < all);
  ptx::fetch_add_in_block(wide, int64_t{1} << 33);
  ptx::fetch_add_in_block(reinterpret_cast<int32_t*>(memory), 1);
  ptx::lower_in_block(reinterpret_cast<uint32_t*>(words + 3), static_cast<uint32_t>(all - me));
  ptx::set_in_block(marks + (me ^ 1));
  ptx::sync_block();
  expect(r, words[0] == 3 * all && words[1] == all && wide[0] == int64_t{all} << 33);
  expect(r, words[3] == 1);
  expect(r, *reinterpret_cast<int32_t*>(memory) == all && marks[me] == 1);
  if (me == 0) ptx::store_shared_relaxed(words + 2, 7);
  await(r, [&] { return ptx::load_shared_relaxed(words + 2) == 7; });
  end(r);
}

// ---- lanes, loads, time -------------------------------------------------------------------------

UEC_PROBE(check_warp) {
  const int32_t lane = ptx::thread_idx();
  const auto value = static_cast<uint32_t>(lane);
  expect(r, ptx::shuffle(value * 3, (lane + 5) % 32) == (value + 5) % 32 * 3);
  expect(r, ptx::reduce_min(value + 9) == 9 && ptx::reduce_add(value) == 496);
  expect(r, ptx::ballot(lane % 3 == 0) == 0x49249249u);
  expect(r, ptx::match(value % 4) == 0x11111111u << (value % 4));
  expect(r, ptx::num_set(0xF0F0u) == 8 && ptx::lowest_set(0x50u << value % 8) == lane % 8 + 4);
  end(r);
}

UEC_PROBE(check_loads) {
  const int32_t lane = ptx::thread_idx();
  auto* const words = reinterpret_cast<uint32_t*>(memory);
  fill(memory, 128, 5);
  ptx::sync_block();
  const uint4 four = ptx::load_global(reinterpret_cast<const uint4*>(memory) + lane);
  expect(r, four.x == pattern(4 * lane, 5) && four.w == pattern(4 * lane + 3, 5));
  const uint64_t two = ptx::load_global(reinterpret_cast<const uint64_t*>(memory) + lane);
  expect(r, two == (uint64_t{pattern(2 * lane + 1, 5)} << 32 | pattern(2 * lane, 5)));
  const uint32_t one = ptx::load_global(words + lane);
  expect(r, one == pattern(lane, 5));
  expect(r, ptx::load_global(reinterpret_cast<const uint16_t*>(words + lane) + 1) == one >> 16);
  expect(r, ptx::load_global(memory + 4 * lane + 3) == one >> 24);
  // Subnormals stay, and a tie goes to the even number.
  expect(r, __float_as_uint(ptx::add(__uint_as_float(words[0] * 0 + 3), __uint_as_float(4))) == 7);
  expect(r, ptx::add(16777216.0f + static_cast<float>(0 * lane), 1.0f) == 16777216.0f);
  end(r);
}

UEC_PROBE(check_clock) {
  const uint64_t begin = ptx::nanoseconds();
  uint64_t last = begin;
  for (int32_t i = 0; i < 1000 && last < begin + 5000; ++i) {
    ptx::pause();
    const uint64_t now = ptx::nanoseconds();
    expect(r, now >= last);
    last = now;
  }
  expect(r, last > begin && last < begin + kLimitNs);
  end(r);
}

// ---- what it costs ------------------------------------------------------------------------------

namespace {

__device__ uint64_t cycles() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}
// The time of `count` times `step`, by one thread of each block; of blocks, the slowest's.
template <int kUnroll, class Step>
__device__ void measure(Results* r, int64_t count, const Step& step) {
  const uint64_t begin = cycles();
#pragma unroll 1
  for (int64_t i = 0; i < count; i += kUnroll) {
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) step();
  }
  const uint64_t taken = cycles() - begin;
  if (ptx::thread_idx() == 0) {
    ptx::max_relaxed(&r->values[0], taken);
    ptx::add_relaxed(&r->values[1], static_cast<uint64_t>(count));
  }
  end(r);
}
// What was computed is used, so that the assembler does not leave it out.
__device__ void keep(Results* r, uint64_t value) {
  if (static_cast<uint32_t>(value) == 0x9ABCDEF1) r->values[61] = value;
}
__device__ uint64_t load_near(const uint64_t* at) {  // not of the first-level cache
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// A word that holds its own address: each load depends on the one before.
template <class Load>
__device__ void chase(Results* r, void* at, int64_t count, const Load& load) {
  auto* p = static_cast<uint64_t*>(at);
  *p = reinterpret_cast<uint64_t>(p);
  ptx::fence_system();
  p = reinterpret_cast<uint64_t*>(load(p));
  keep(r, reinterpret_cast<uint64_t>(p));  // it has come before the clock starts
  measure<16>(r, count, [&] { p = reinterpret_cast<uint64_t*>(load(p)); });
  keep(r, reinterpret_cast<uint64_t>(p));
}

}  // namespace

extern "C" __global__ void empty() {}

// Cycles, of nanoseconds.
UEC_PROBE(measure_clock) {
  const uint64_t ns = ptx::nanoseconds(), begin = cycles();
  uint64_t now = ns;
  while (now - ns < static_cast<uint64_t>(rounds)) now = ptx::nanoseconds();
  r->values[0] = cycles() - begin;
  r->values[1] = now - ns;
  end(r);
}
UEC_PROBE(measure_alu) {
  uint32_t value = ptx::thread_idx(), other = value | 5;  // not uniform: those have other registers
  measure<32>(r, rounds, [&] {  // two: of one kind, the assembler makes one of several
    asm volatile("add.u32 %0, %0, %1;\n xor.b32 %0, %0, %1;" : "+r"(value) : "r"(other));
  });
  keep(r, value);
}
// A step multiplies, compares and branches; how often only the loop itself can tell.
UEC_PROBE(measure_branch) {
  const auto step = [](uint32_t n) { return n * 5 + 3; };
  uint32_t n = ptx::thread_idx(), last = n;
  uint64_t steps = 0;
  for (int64_t i = 0; i < rounds; ++i) last = step(last);
  const uint64_t begin = cycles();
#pragma unroll 1
  do {
    n = step(n);
    ++steps;
  } while (n != last);
  r->values[0] = cycles() - begin;
  r->values[1] = steps;
  end(r);
}
UEC_PROBE(measure_shuffle) {
  uint32_t value = ptx::thread_idx();
  const int32_t next = (ptx::thread_idx() + 1) % 32;
  measure<16>(r, rounds, [&] { value = ptx::shuffle(value, next); });
  keep(r, value);
}
UEC_PROBE(measure_barrier) {
  measure<16>(r, rounds, [&] { ptx::sync_block(); });
}
UEC_PROBE(measure_shared) {
  uint32_t at = ptx::shared_address(dynamic);
  *reinterpret_cast<volatile uint32_t*>(dynamic) = at;
  measure<16>(r, rounds, [&] { asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at)::"memory"); });
  keep(r, at);
}
UEC_PROBE(measure_l1) {
  chase(r, memory, rounds, [](const uint64_t* p) { return ptx::load_global(p); });
}
// Also of each line by itself: some are in the far half.
UEC_PROBE(measure_l2) {
  chase(r, memory, rounds, load_near);
  for (int32_t line = 0; line < 32; ++line) {
    auto* p = reinterpret_cast<uint64_t*>(memory) + 16 * (37 * line + 1);
    *p = reinterpret_cast<uint64_t>(p);
    ptx::fence_system();
    const uint64_t begin = cycles();
    for (int64_t i = 0; i < rounds; ++i) p = reinterpret_cast<uint64_t*>(load_near(p));
    r->values[2 + line] = (cycles() - begin) / static_cast<uint64_t>(rounds);
    keep(r, reinterpret_cast<uint64_t>(p));
  }
}
// A chain of `rounds` lines, each on pages of its own; the caller empties the cache in between.
UEC_PROBE(prepare_dram) {
  constexpr int64_t kStride = 131072 + 128;
  for (int64_t i = 0; i < rounds; ++i)
    *reinterpret_cast<uint64_t*>(memory + i * kStride) =
        reinterpret_cast<uint64_t>(memory + (i + 1021) % rounds * kStride);
  end(r);
}
UEC_PROBE(measure_dram) {
  auto* p = reinterpret_cast<uint64_t*>(memory);
  measure<1>(r, rounds, [&] { p = reinterpret_cast<uint64_t*>(load_near(p)); });
  keep(r, reinterpret_cast<uint64_t>(p));
}
UEC_PROBE(measure_host) {
  chase(r, host, rounds, [](const uint64_t* p) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
  });
}
UEC_PROBE(measure_acquire_device) {
  chase(r, memory, rounds, [](const uint64_t* p) { return ptx::load_acquire_device(p); });
}
UEC_PROBE(measure_acquire_system) {
  chase(r, memory, rounds, [](const uint64_t* p) { return ptx::load_acquire_system(p); });
}
// A store and a fence, and either by itself.
#define UEC_COST(name, step)                                               \
  UEC_PROBE(name) {                                                        \
    [[maybe_unused]] auto* const at = reinterpret_cast<uint64_t*>(memory); \
    measure<4>(r, rounds, [&] { step; });                                  \
  }
__device__ inline void store(volatile uint64_t* at) { *at = 1; }
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
UEC_COST(measure_release_device, ptx::store_release_device(at, 1))
UEC_COST(measure_release_system, ptx::store_release_system(at, 1))
UEC_COST(measure_fence_device, fence_device())
UEC_COST(measure_fence_system, ptx::fence_system())
UEC_COST(measure_store_fence_device, (store(at), fence_device()))
UEC_COST(measure_store_fence_system, (store(at), ptx::fence_system()))

// All blocks on one address, a thread of each; the last addition of each comes back.
UEC_PROBE(measure_atomic_rate) {
  auto* const words = reinterpret_cast<int32_t*>(memory);
  const int32_t blocks = ptx::num_blocks_x();
  const int32_t all = (ptx::fetch_add_relaxed(words + 64, 1) / blocks + 1) * blocks;
  await(r, [&] { return ptx::load_relaxed(words + 64) >= all; });
  const uint64_t begin = cycles();
#pragma unroll 16
  for (int64_t i = 1; i < rounds; ++i) ptx::add_relaxed(words, 1);
  expect(r, ptx::fetch_add_relaxed(words, 1) >= rounds - 1);
  ptx::max_relaxed(&r->values[0], cycles() - begin);
  ptx::add_relaxed(&r->values[1], static_cast<uint64_t>(rounds));
  end(r);
}
UEC_PROBE(measure_atomic_trip) {
  int32_t value = 1;
  measure<4>(r, rounds,
             [&] { value = ptx::fetch_add_relaxed(reinterpret_cast<int32_t*>(memory), value); });
  keep(r, static_cast<uint64_t>(value));
}
UEC_PROBE(measure_compare_swap_trip) {
  int32_t value = 0;
  measure<4>(r, rounds, [&] {
    value = ptx::compare_swap_relaxed(reinterpret_cast<int32_t*>(memory), value, value);
  });
  keep(r, static_cast<uint64_t>(value));
}
UEC_PROBE(measure_bulk_first) {
  uint64_t* const barrier = barriers_at(kTileBytes);
  uint32_t phase = 0;
  init_barriers(barrier, 1, 1);
  measure<1>(r, rounds, [&] {
    load(dynamic, memory, 16, barrier);
    while (!ptx::mbarrier_test(barrier, phase)) {
    }
    phase ^= 1;
  });
}
// Bytes in and out: tiles of `rounds` through four buffers, by one thread of a block.
UEC_PROBE(measure_bulk_copy) {
  constexpr int32_t kBuffers = 4;
  uint64_t* const full = barriers_at(kBuffers * kTileBytes);
  uint8_t* const from = memory + 2 * ptx::block_x() * rounds * kTileBytes;
  uint8_t* const to = from + rounds * kTileBytes;
  const auto load_tile = [&](int64_t t) {
    load(dynamic + t % kBuffers * kTileBytes, from + t * kTileBytes, kTileBytes,
         full + t % kBuffers);
  };
  init_barriers(full, kBuffers, 1);
  const uint64_t begin = cycles();
  for (int64_t t = 0; t < kBuffers - 1; ++t) load_tile(t);
  for (int64_t t = 0; t < rounds; ++t) {
    const auto parity = static_cast<uint32_t>(t / kBuffers & 1);
    while (!ptx::mbarrier_test(full + t % kBuffers, parity)) {
    }
    ptx::bulk_store(to + t * kTileBytes, dynamic + t % kBuffers * kTileBytes, kTileBytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();  // the buffer of the tile before is free
    if (t + kBuffers - 1 < rounds) load_tile(t + kBuffers - 1);
  }
  ptx::bulk_wait<0>();
  ptx::max_relaxed(&r->values[0], cycles() - begin);
  ptx::add_relaxed(&r->values[1], 2 * static_cast<uint64_t>(rounds) * kTileBytes);
  end(r);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1)
    measure_cluster(Results* r, uint8_t* memory, uint64_t* host, int64_t rounds) {
  uint32_t at;  // in the second block
  asm volatile("mapa.shared::cluster.u32 %0, %1, 1;"
               : "=r"(at)
               : "r"(ptx::shared_address(dynamic)));
  if (ptx::block_x() == 1) *reinterpret_cast<volatile uint32_t*>(dynamic) = at;
  const auto meet = [] {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
  };
  meet();
  if (ptx::block_x() == 0) {
    measure<16>(r, rounds, [&] {
      asm volatile("ld.shared::cluster.u32 %0, [%0];" : "+r"(at)::"memory");
    });
    keep(r, at);
  } else {
    end(r);
  }
  meet();
}
