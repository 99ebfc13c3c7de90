// The save kernel: one block copies a plan into an entry of the plan store.
//
// The entry of a captured save gets a plan in every replay. Its mark says that the plan there has
// not been reduced or released: then a save leaves it as it is, and reports that to the host.
#pragma once

#include "cuda/device/args.hpp"
#include "cuda/device/ptx.cuh"

namespace uec::cuda {

// Whether the entry's plan is in use, and must be kept. By one thread.
UEC_DEVICE bool is_kept(const SaveArgs& args) {
  uint64_t* const in_use = args.in_use;
  if (in_use == nullptr) return false;
  if (args.generation == 0) {
    *in_use = 0;
    return false;
  }
  // An earlier generation belongs to an owner that gave up the entry with a plan in it.
  return ptx::fetch_max_relaxed(in_use, args.generation) >= args.generation;
}

// Reports a fault to the host, unless one is pending there. Launches of a rank follow each other.
UEC_DEVICE void put_fault(const SaveArgs& args) {
  auto& said = *args.fault;
  // Acquire: pairs with the host's release after it has read the last fault, and freed its place.
  if (ptx::load_acquire_system(&said.tag) != 0) return;
  said.generation = args.generation;
  // Release: pairs with the host's acquire, which finds the fault complete.
  ptx::store_release_system(&said.tag, args.tag);
}

UEC_DEVICE void copy_words(const SavedField& field) {
  uint32_t* const to = field.to;
  const uint32_t* const from = field.from;
  const int32_t count = field.count, step = ptx::num_threads();
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < count; i += kWordsAtOnce * step) {
    uint32_t words[kWordsAtOnce];
#pragma unroll
    for (int32_t j = 0; j < kWordsAtOnce; ++j)
      if (i + j * step < count) words[j] = from[i + j * step];
#pragma unroll
    for (int32_t j = 0; j < kWordsAtOnce; ++j)
      if (i + j * step < count) to[i + j * step] = words[j];
  }
}

// `shared_memory`: a word.
UEC_DEVICE void save_plan(const SaveArgs& args, std::byte* shared_memory) {
  auto& kept = *reinterpret_cast<int32_t*>(shared_memory);
  if (ptx::thread_idx() == 0) {
    kept = is_kept(args);
    if (kept) put_fault(args);
  }
  ptx::sync_block();
  if (kept) return;
#pragma unroll 1
  for (int32_t i = 0; i < args.num_fields; ++i) copy_words(args.fields[i]);
}

}  // namespace uec::cuda
