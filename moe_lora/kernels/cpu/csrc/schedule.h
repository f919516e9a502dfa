// SPDX-License-Identifier: Apache-2.0
// Independent tasks over threads: each thread claims the next task before it runs the current one, so that a
// task can fetch the first bytes of its successor.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

// run(task, following) for each task in [0, count); following is -1 if this thread has none yet.
template <class Run>
void run_tasks(int64_t count, int threads, const Run& run) {
    if (threads <= 1 || count <= 1) {
        for (int64_t task = 0; task < count; task++) run(task, task + 1 < count ? task + 1 : -1);
        return;
    }
    std::atomic<int64_t> unclaimed{0};
#pragma omp parallel num_threads(int(std::min<int64_t>(threads, count)))
    {
        int64_t task = unclaimed.fetch_add(1, std::memory_order_relaxed);
        while (task < count) {
            const int64_t following = unclaimed.fetch_add(1, std::memory_order_relaxed);
            run(task, following < count ? following : -1);
            task = following;
        }
    }
}

// Threads worth waking for this many bytes of memory traffic.
inline int useful_threads(int threads, int64_t bytes) {
    return int(std::min<int64_t>(threads, std::max<int64_t>(1, bytes >> 15)));
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
