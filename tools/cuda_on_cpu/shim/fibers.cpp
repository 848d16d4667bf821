// Runs a grid: every thread of a block is a fiber, blocks are shared out over threads of the system.
//
// A fiber runs until it waits at a meeting or leaves the kernel. The order of lanes and warps is forward or backward; a kernel
// that misses a barrier gives different results in the two. What no order may ever see ends the launch with a sentence.

#include "cuda_on_cpu.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <thread>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// What kernels see as their dynamic shared memory: the most that any card gives a block, and a guard behind it.
constexpr size_t MAX_SHARED = 232448, GUARD = 64;
alignas(128) thread_local unsigned char dynamic_shared[MAX_SHARED + GUARD];

namespace cuda_on_cpu {

thread_local uint3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr unsigned WARP = 32, MAX_THREADS = 1024;
// Kernels keep little on their stacks; C's mathematics and printing need some.
constexpr size_t STACK = 64 << 10, PAGE = 4096;
// Neither a number that passes unnoticed (NaN as f32 and f16) nor an index that does.
constexpr unsigned char RUBBISH = 0xff;

#if defined(__x86_64__)
// A context is a stack pointer; what a call must keep lies on top of the stack.
using Context = void *;
extern "C" void cuda_on_cpu_switch(void **save, void *to);
asm(R"(
.text
.globl cuda_on_cpu_switch
.hidden cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
void change(Context &from, Context &to) { cuda_on_cpu_switch(&from, to); }
void prepare(Context &context, char *stack, size_t size, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack + size);
    *--top = nullptr; // where `entry` would return to; it also makes the stack as aligned as after a call
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context = top;
}
#else
using Context = ucontext_t;
void change(Context &from, Context &to) { swapcontext(&from, &to); }
void prepare(Context &context, char *stack, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

struct Fiber {
    Context context;
    uint3 index;
};

// Lanes that have come to a meeting, and where it is.
struct Gathering {
    unsigned arrived = 0, mask = 0;
    const char *file = nullptr;
    int line = 0;
};

struct Warp {
    Gathering gathering;
    // Lanes: that this block has, that are in the kernel, and that wait for nothing.
    unsigned all = 0, live = 0, ready = 0;
    // Of this meeting and of the one before: a lane may be at the next one before the others have read.
    uint64_t words[2][WARP];
    unsigned turn = 0;
};

// What all threads of the system that run one launch share.
struct Launch {
    Run run;
    void *const *arguments;
    uint3 grid, block;
    size_t shared;
    bool backward;
    const char *name;
    std::atomic<bool> failed{false};
    std::mutex lock;
    char *message;
    size_t room;
};

// The stacks of a block's fibers. They are kept from launch to launch: a small launch would take less time than making them.
class Stacks {
  public:
    Stacks() {
        std::lock_guard<std::mutex> guard(lock);
        if (!unused.empty()) {
            map = unused.back();
            unused.pop_back();
            return;
        }
        void *fresh =
            mmap(nullptr, MAX_THREADS * EACH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fresh == MAP_FAILED) throw std::bad_alloc();
        map = static_cast<char *>(fresh);
        // A stack grows down into a page that nobody may touch.
        for (unsigned i = 0; i < MAX_THREADS; i++) mprotect(map + i * EACH, PAGE, PROT_NONE);
    }
    ~Stacks() {
        std::lock_guard<std::mutex> guard(lock);
        unused.push_back(map);
    }
    char *of(unsigned i) const { return map + i * EACH + PAGE; }
    // Stacks that all began at the same place of a page would all want the same few lines of a processor's cache.
    static size_t size(unsigned i) { return STACK - i % WARP * 128; }

  private:
    static constexpr size_t EACH = STACK + PAGE;
    static std::mutex lock;
    static std::vector<char *> unused;
    char *map;
};
std::mutex Stacks::lock;
std::vector<char *> Stacks::unused;

class Block;
thread_local Block *current;

class Block {
  public:
    explicit Block(Launch &launch) : launch(launch) {
        threads = launch.block.x * launch.block.y * launch.block.z;
        fibers.resize(threads);
    }

    void run(uint3 index) {
        block_index = index;
        memset(dynamic_shared, RUBBISH, launch.shared + GUARD);
        warps.assign((threads + WARP - 1) / WARP, Warp{});
        gathering = Gathering{};
        live = threads;
        for (unsigned i = 0; i < threads; i++) {
            Fiber &fiber = fibers[i];
            uint3 b = launch.block;
            fiber.index = {i % b.x, i / b.x % b.y, i / (b.x * b.y)};
            warps[i / WARP].all |= 1u << i % WARP;
            prepare(fiber.context, stacks.of(i), stacks.size(i), enter);
        }
        for (Warp &warp : warps) warp.live = warp.ready = warp.all;
        while (live > 0 && !launch.failed) {
            if (!turn() && !launch.failed) deadlock();
        }
        for (size_t i = 0; i < GUARD && !launch.failed; i++) {
            if (dynamic_shared[launch.shared + i] != RUBBISH)
                fail("writes behind its %zu bytes of shared memory, at byte %zu", launch.shared, launch.shared + i);
        }
    }

    void meet(Meeting kind, unsigned mask, const char *file, int line) {
        if (kind == Meeting::block)
            arrive(gathering, mask, file, line);
        else
            arrive_in_warp(mask, file, line);
    }

    const uint64_t *exchange(unsigned mask, uint64_t word, const char *file, int line) {
        Warp &warp = warps[at / WARP];
        uint64_t *words = warp.words[warp.turn % 2];
        words[at % WARP] = word;
        arrive_in_warp(mask, file, line);
        return words;
    }

    unsigned lane() const { return at % WARP; }

  private:
    Launch &launch;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Context scheduler;
    Stacks stacks;
    unsigned threads, live = 0, at = 0, arrived = 0;
    Gathering gathering; // of the block; `arrived` counts its threads

    // Lets every warp run as far as it comes; false if none could.
    bool turn() {
        bool moved = false;
        unsigned count = unsigned(warps.size());
        for (unsigned k = 0; k < count; k++) {
            unsigned w = launch.backward ? count - 1 - k : k;
            if (!warps[w].ready || launch.failed) continue;
            moved = true;
            // Before its first lane in the order.
            at = launch.backward ? w * WARP : w * WARP + WARP - 1;
            change(scheduler, next());
        }
        return moved;
    }

    // Who runs after the lane `at`: the next lane of its warp that waits for nothing, round and round, else the scheduler.
    Context &next() {
        unsigned ready = warps[at / WARP].ready, lane = at % WARP;
        if (!ready || launch.failed) return scheduler;
        unsigned behind = launch.backward ? ready & ((1u << lane) - 1) : ready & ~((2u << lane) - 1);
        unsigned those = behind ? behind : ready;
        at = at - lane + (launch.backward ? 31 - __builtin_clz(those) : __builtin_ctz(those));
        thread_index = fibers[at].index;
        return fibers[at].context;
    }

    static void enter() {
        Block *block = current;
        block->launch.run(block->launch.arguments);
        block->leave();
    }

    void leave() {
        Warp &warp = warps[at / WARP];
        unsigned bit = 1u << at % WARP;
        live--;
        warp.live &= ~bit;
        warp.ready &= ~bit;
        if (arrived > 0)
            fail("thread %u left the kernel while %u others wait for it at %s:%d", at, arrived,
                                  gathering.file, gathering.line);
        if (warp.gathering.arrived && warp.gathering.mask & bit)
            fail("lane %u of warp %u left the kernel while others wait for it at %s:%d", at % WARP,
                                  at / WARP, warp.gathering.file, warp.gathering.line);
        Context nowhere;
        change(nowhere, next());
        abort(); // nobody comes back to a fiber that has left
    }

    void pause() {
        Context &mine = fibers[at].context, &other = next();
        if (&mine != &other) change(mine, other);
    }

    static bool same_place(const Gathering &gathering, const char *file, int line) {
        return gathering.line == line && (gathering.file == file || strcmp(gathering.file, file) == 0);
    }

    // All threads of the block have to come, to the same place.
    void arrive(Gathering &gathering, unsigned, const char *file, int line) {
        if (live != threads) {
            fail("thread %u waits at %s:%d for %u threads that have left the kernel", at, file, line, threads - live);
            return pause();
        }
        if (arrived == 0) {
            gathering.file = file;
            gathering.line = line;
        } else if (!same_place(gathering, file, line)) {
            fail("thread %u waits at %s:%d, others of its block at %s:%d: the barrier is divergent", at, file, line,
                 gathering.file, gathering.line);
            return pause();
        }
        warps[at / WARP].ready &= ~(1u << at % WARP);
        if (++arrived == threads) {
            arrived = 0;
            for (Warp &warp : warps) warp.ready = warp.all;
        }
        pause();
    }

    void arrive_in_warp(unsigned mask, const char *file, int line) {
        Warp &warp = warps[at / WARP];
        Gathering &gathering = warp.gathering;
        unsigned bit = 1u << at % WARP, there = warp.all;
        if (!(mask & bit)) {
            fail("lane %u calls %s:%d with mask %08x, which leaves it out", at % WARP, file, line, mask);
            return pause();
        }
        if (mask & there & ~warp.live) {
            fail("the mask %08x at %s:%d names lanes %08x that have left the kernel", mask, file, line,
                 mask & there & ~warp.live);
            return pause();
        }
        if (gathering.arrived == 0) {
            gathering.mask = mask;
            gathering.file = file;
            gathering.line = line;
        } else if (gathering.mask != mask) {
            fail("lanes of a warp meet at %s:%d with masks %08x and %08x", file, line, gathering.mask, mask);
            return pause();
        } else if (!same_place(gathering, file, line)) {
            fail("lane %u is at %s:%d, others of its warp wait at %s:%d", at % WARP, file, line, gathering.file,
                 gathering.line);
            return pause();
        }
        gathering.arrived |= bit;
        if (gathering.arrived != (mask & there)) {
            warp.ready &= ~bit;
            return pause();
        }
        // The last one does not wait.
        warp.ready |= gathering.arrived;
        gathering.arrived = 0;
        warp.turn++;
    }

    void deadlock() {
        for (unsigned w = 0; w < warps.size(); w++) {
            const Gathering &g = warps[w].gathering;
            if (g.arrived)
                return fail(
                    "deadlock: at %s:%d lanes %08x of warp %u wait for lanes %08x, which wait elsewhere", g.file, g.line,
                    g.arrived, w, g.mask & ~g.arrived);
        }
        fail("deadlock: %u of %u threads wait at %s:%d", arrived, threads, gathering.file, gathering.line);
    }

    // Ends the launch; the first thread of the system to see something is the one that says it. Whoever calls it from a fiber
    // pauses after it and is never resumed.
    __attribute__((format(printf, 2, 3))) void fail(const char *format, ...) {
        std::lock_guard<std::mutex> guard(launch.lock);
        if (launch.failed) return;
        int used = snprintf(launch.message, launch.room, "%s, block (%u, %u, %u): ", launch.name, block_index.x,
                            block_index.y, block_index.z);
        va_list values;
        va_start(values, format);
        if (used >= 0 && size_t(used) < launch.room) vsnprintf(launch.message + used, launch.room - used, format, values);
        va_end(values);
        launch.failed = true;
    }
};

void run_blocks(Launch &launch, unsigned first, unsigned step) {
    block_size = launch.block;
    grid_size = launch.grid;
    Block block(launch);
    current = &block;
    uint64_t total = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    for (uint64_t i = first; i < total && !launch.failed; i += step) {
        uint64_t b = launch.backward ? total - 1 - i : i;
        uint3 g = launch.grid;
        block.run({unsigned(b % g.x), unsigned(b / g.x % g.y), unsigned(b / g.x / g.y)});
    }
    current = nullptr;
}

} // namespace

void meet(Meeting kind, unsigned mask, const char *file, int line) { current->meet(kind, mask, file, line); }
const uint64_t *exchange(unsigned mask, uint64_t word, const char *file, int line) {
    return current->exchange(mask, word, file, line);
}
unsigned lane() { return current->lane(); }

} // namespace cuda_on_cpu

using cuda_on_cpu::Kernel;

// Made by build.rs: the kernels of all sources.
extern "C" const Kernel *const cuda_on_cpu_table[];
extern "C" const size_t cuda_on_cpu_counts[];
extern "C" const size_t cuda_on_cpu_sources;

extern "C" const Kernel *cuda_on_cpu_kernel(const char *name) {
    for (size_t s = 0; s < cuda_on_cpu_sources; s++) {
        for (size_t i = 0; i < cuda_on_cpu_counts[s]; i++) {
            if (strcmp(cuda_on_cpu_table[s][i].name, name) == 0) return &cuda_on_cpu_table[s][i];
        }
    }
    return nullptr;
}

extern "C" const char *cuda_on_cpu_name(size_t index) {
    for (size_t s = 0; s < cuda_on_cpu_sources; s++) {
        if (index < cuda_on_cpu_counts[s]) return cuda_on_cpu_table[s][index].name;
        index -= cuda_on_cpu_counts[s];
    }
    return nullptr;
}

extern "C" size_t cuda_on_cpu_argument(const Kernel *kernel, size_t index) {
    return index < kernel->arguments ? kernel->sizes[index] : 0;
}

extern "C" int cuda_on_cpu_launch(const Kernel *kernel, const unsigned grid[3], const unsigned block[3], size_t shared,
                                  void *const *arguments, unsigned threads, int backward, char *message, size_t room) {
    using namespace cuda_on_cpu;
    Launch launch{};
    launch.run = kernel->run;
    launch.arguments = arguments;
    launch.grid = {grid[0], grid[1], grid[2]};
    launch.block = {block[0], block[1], block[2]};
    launch.shared = shared;
    launch.backward = backward != 0;
    launch.name = kernel->name;
    launch.message = message;
    launch.room = room;
    uint64_t size = uint64_t(block[0]) * block[1] * block[2], blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    // The driver's own limits.
    if (size == 0 || size > MAX_THREADS || blocks == 0 || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535 ||
        shared > MAX_SHARED) {
        snprintf(message, room, "%s: no card runs a grid of %u x %u x %u blocks of %u x %u x %u threads with %zu bytes",
                 kernel->name, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared);
        return 1;
    }
    threads = unsigned(min<uint64_t>(max(threads, 1u), blocks));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back([&launch, i, threads] { run_blocks(launch, i, threads); });
    run_blocks(launch, 0, threads);
    for (std::thread &other : others) other.join();
    return launch.failed;
}
