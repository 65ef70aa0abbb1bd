// Memory for torch's tensors in ordinary blocks of the C library, aligned by hand.
//
// torch asks for aligned blocks, and glibc looks for a gap that is larger than such a block by the alignment: the gap
// that one of the same size has left often doesn't fit. Blocks that are a little larger and aligned inside do, so that
// a step finds its blocks where the one before had them.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr size_t ALIGNMENT = 64, BEFORE = sizeof(void*);  // where the block itself begins stands before the tensor

void release(void* at) {
    if (at) std::free(static_cast<void**>(at)[-1]);
}

struct Heap final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        const c10::Device device(c10::DeviceType::CPU);
        if (!size) return {nullptr, nullptr, &release, device};
        const size_t whole = size + BEFORE + ALIGNMENT;
        void* const block = whole > size ? std::malloc(whole) : nullptr;
        if (!block) throw std::runtime_error("can't allocate memory for a tensor of " + std::to_string(size) + " bytes");
        const uintptr_t first = reinterpret_cast<uintptr_t>(block) + BEFORE;
        void* const at = reinterpret_cast<void*>((first + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        static_cast<void**>(at)[-1] = block;
        return {at, at, &release, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Heap heap;

}  // namespace

extern "C" void take_heap() { c10::SetCPUAllocator(&heap, 100); }
