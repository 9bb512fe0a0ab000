/*
 * Arrays of C++ types on a drive, for kernels in CUDA C++:
 *
 *     __global__ void kernel(const onehop_array *handle, const unsigned long long *ids, unsigned int n, Row *out)
 *     {
 *         onehop::array<Row> rows(handle);
 *         auto block = cooperative_groups::this_thread_block();
 *         rows.gather(block, ids, n, out);            // every thread of the block helps
 *         Row row;
 *         rows.read(ids[0], &row);                    // one thread
 *         onehop::pin<Row> pinned(rows, ids[1]);      // in place, as long as `pinned` lives
 *         if (pinned)
 *             use(pinned->field);
 *     }
 *
 * Every function returns ONEHOP_OK or another onehop_answer or onehop_array_answer, and ends within the array's time limits. A
 * row is sizeof(Row) bytes, a multiple of 4, and may begin in one page and end in the next. Link as for device.h, whose functions
 * these call.
 */
#ifndef ONEHOP_ARRAY_H
#define ONEHOP_ARRAY_H

#include "device.h"

#if defined(__cplusplus) && (defined(__CUDACC__) || defined(__CUDACC_RTC__))

namespace onehop {

template <class Row> class array {
    static_assert(sizeof(Row) % 4 == 0, "rows are copied in words of 4 bytes");
    static_assert(__is_trivially_copyable(Row), "rows are copied as bytes");

  public:
    using index = unsigned long long;

    __device__ explicit array(const onehop_array *handle)
        : handle_(handle), size_(onehop_array_bytes(handle) / sizeof(Row))
    {
    }

    __device__ const onehop_array *handle() const { return handle_; }

    /* Whole rows; 0 if it is no array. */
    __device__ index size() const { return size_; }

    /* ONEHOP_OK if there is such a row. */
    __device__ int check(index i) const
    {
        return i < size_ ? ONEHOP_OK : size_ ? ONEHOP_ARRAY_END : ONEHOP_NO_ARRAY;
    }

    /* Reads one row, by one thread. */
    __device__ int read(index i, Row *to) const
    {
        return move(i, [&](index byte, unsigned int done, unsigned int *bytes) {
            onehop_pin pin;
            int answer = onehop_array_pin(handle_, byte, &pin);
            if (answer != ONEHOP_OK)
                return answer;
            *bytes = pin.bytes < *bytes ? pin.bytes : *bytes;
            copy(reinterpret_cast<char *>(to) + done, static_cast<const char *>(pin.at), *bytes);
            return onehop_array_unpin(handle_, &pin);
        });
    }

    /* Writes one row, by one thread. */
    __device__ int write(index i, const Row &from) const
    {
        return move(i, [&](index byte, unsigned int done, unsigned int *bytes) {
            onehop_pin pin;
            int answer = onehop_array_pin_mut(handle_, byte, &pin);
            if (answer != ONEHOP_OK)
                return answer;
            *bytes = pin.bytes < *bytes ? pin.bytes : *bytes;
            copy(static_cast<char *>(pin.at), reinterpret_cast<const char *>(&from) + done, *bytes);
            return onehop_array_unpin_mut(handle_, &pin);
        });
    }

    /*
     * Reads the rows `ids` to `out`, by all threads of a group of cooperative_groups: a block, or a tile of one. All of them call
     * it with the same arguments, and have to be there. The result is that of the rows which the calling thread was responsible
     * for: ONEHOP_OK, or the first error. `answers`, unless it is null, gets the result of each row. Rows in the cache are copied
     * by all threads together; each of the others is read by one thread. The group synchronises at the end: then `out` is filled.
     */
    template <class Group>
    __device__ int gather(const Group &group, const index *ids, unsigned int n, Row *out, int *answers = nullptr) const
    {
        /* Neighbours in a warp. */
        const unsigned int rank = group.thread_rank(), threads = group.size();
        const unsigned int lane = rank % 32, left = threads - (rank - lane), lanes = left < 32 ? left : 32;
        const unsigned int first = lane_of_warp() - lane;
        const unsigned int mask = (lanes < 32 ? (1u << lanes) - 1 : ~0u) << first;
        /* Few rows are spread over all warps: each then copies for a shorter time. A warp with fewer lanes takes fewer. */
        const unsigned int warps = (threads + 31) / 32, share = n / warps + (n % warps != 0);
        const unsigned int stride = share < 32 ? share : 32, chunk = stride < lanes ? stride : lanes;
        const bool wide = sizeof(Row) % 16 == 0 && reinterpret_cast<index>(out) % 16 == 0;
        int kept = size_ ? ONEHOP_OK : ONEHOP_NO_ARRAY;

        for (index start = index(rank / 32) * stride; start < n; start += index(warps) * stride) {
            const unsigned int rows = n - start < stride ? static_cast<unsigned int>(n - start) : stride;
            for (unsigned int part = 0; part < rows; part += chunk) {
                const unsigned int here = rows - part < chunk ? rows - part : chunk;
                const int answer = some(lane, here, ids + start + part, out + start + part, wide, mask, first);
                if (answer != ONEHOP_OK && kept == ONEHOP_OK)
                    kept = answer;
                if (answers && lane < here)
                    answers[start + part + lane] = answer;
            }
        }
        group.sync();
        return kept;
    }

  private:
    const onehop_array *handle_;
    index size_;

    struct alignas(16) quad {
        unsigned int word[4];
    };

    static __device__ unsigned int lane_of_warp()
    {
        unsigned int lane;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }

    static __device__ void copy(char *to, const char *from, unsigned int bytes)
    {
        for (unsigned int at = 0; at < bytes; at += 4)
            *reinterpret_cast<unsigned int *>(to + at) = *reinterpret_cast<const unsigned int *>(from + at);
    }

    /* Calls `one` with each part of a row that is in one page: its byte in the array, how much is done, and how much is left, of
     * which it says how much it has done. */
    template <class One> __device__ int move(index i, One one) const
    {
        const int found = check(i);
        if (found != ONEHOP_OK)
            return found;
        for (unsigned int done = 0; done < sizeof(Row);) {
            unsigned int bytes = sizeof(Row) - done;
            const int answer = one(i * sizeof(Row) + done, done, &bytes);
            if (answer != ONEHOP_OK)
                return answer;
            done += bytes;
        }
        return ONEHOP_OK;
    }

    /* At most a row for each lane of this warp. */
    __device__ int some(unsigned int lane, unsigned int rows, const index *ids, Row *out, bool wide, unsigned int mask,
                        unsigned int first) const
    {
        /* Lanes without a row pin the first one: what follows a call by only some lanes took longer (docs/benchmarks.md). */
        const index id = ids[lane < rows ? lane : 0];
        const int found = check(id);
        onehop_pin pin = {};
        const int pinned = onehop_array_pin_cached(handle_, found == ONEHOP_OK ? id * sizeof(Row) : ~index(0), &pin);
        const bool hit = pinned == ONEHOP_OK && pin.bytes >= sizeof(Row);
        int answer = found != ONEHOP_OK ? found : hit || pinned != ONEHOP_OK ? pinned : ONEHOP_NOT_CACHED;

        if (pinned == ONEHOP_OK && !hit)
            onehop_array_unpin(handle_, &pin);
        const index from = hit ? reinterpret_cast<index>(pin.at) : 0;
        if (wide)
            together<quad>(lane, rows, from, out, mask, first);
        else
            together<unsigned int>(lane, rows, from, out, mask, first);
        /* The other lanes have read what this one has pinned. */
        __syncwarp(mask);
        if (hit)
            onehop_array_unpin(handle_, &pin);
        /* Nobody of this warp holds a pin now: each may wait. */
        if (lane < rows && answer == ONEHOP_NOT_CACHED)
            answer = read(id, out + lane);
        __syncwarp(mask);
        return lane < rows ? answer : ONEHOP_OK;
    }

    /* All lanes copy each row whose lane says where it is. */
    template <class Word>
    static __device__ void together(unsigned int lane, unsigned int rows, index from, Row *out, unsigned int mask,
                                    unsigned int first)
    {
        constexpr unsigned int each = sizeof(Row) / sizeof(Word) ? sizeof(Row) / sizeof(Word) : 1, at_once = 8;
        const unsigned int lanes = __popc(mask), all = rows * each;

        for (unsigned int start = 0; start < all; start += at_once * lanes) {
            Word words[at_once];
            bool there[at_once];
#pragma unroll
            for (unsigned int k = 0; k < at_once; k++) {
                const unsigned int word = start + k * lanes + lane, row = word / each < rows ? word / each : rows - 1;
                const index at = __shfl_sync(mask, from, first + row);
                there[k] = word < all && at;
                if (there[k])
                    words[k] = reinterpret_cast<const Word *>(at)[word % each];
            }
#pragma unroll
            for (unsigned int k = 0; k < at_once; k++)
                if (there[k])
                    reinterpret_cast<Word *>(out)[start + k * lanes + lane] = words[k];
        }
    }
};

/* A row in its page, which stays in the cache while this lives. */
template <class Row> class pin {
  public:
    __device__ pin(const array<Row> &rows, unsigned long long i) : handle_(rows.handle())
    {
        answer_ = rows.check(i);
        if (answer_ == ONEHOP_OK)
            answer_ = onehop_array_pin(handle_, i * sizeof(Row), &pin_);
        if (answer_ == ONEHOP_OK && pin_.bytes < sizeof(Row)) {
            onehop_array_unpin(handle_, &pin_);
            answer_ = ONEHOP_TWO_PAGES;
        }
    }
    __device__ ~pin()
    {
        if (answer_ == ONEHOP_OK)
            onehop_array_unpin(handle_, &pin_);
    }
    pin(const pin &) = delete;
    pin &operator=(const pin &) = delete;

    __device__ int answer() const { return answer_; }
    __device__ explicit operator bool() const { return answer_ == ONEHOP_OK; }
    __device__ const Row &operator*() const { return *static_cast<const Row *>(pin_.at); }
    __device__ const Row *operator->() const { return static_cast<const Row *>(pin_.at); }

  private:
    const onehop_array *handle_;
    onehop_pin pin_;
    int answer_;
};

/* The same to write to it: it is written back some time after this has ended. */
template <class Row> class pin_mut {
  public:
    __device__ pin_mut(const array<Row> &rows, unsigned long long i) : handle_(rows.handle())
    {
        answer_ = rows.check(i);
        if (answer_ == ONEHOP_OK)
            answer_ = onehop_array_pin_mut(handle_, i * sizeof(Row), &pin_);
        if (answer_ == ONEHOP_OK && pin_.bytes < sizeof(Row)) {
            /* Nothing was stored: it need not be written back. */
            onehop_array_unpin(handle_, &pin_);
            answer_ = ONEHOP_TWO_PAGES;
        }
    }
    __device__ ~pin_mut()
    {
        if (answer_ == ONEHOP_OK)
            onehop_array_unpin_mut(handle_, &pin_);
    }
    pin_mut(const pin_mut &) = delete;
    pin_mut &operator=(const pin_mut &) = delete;

    __device__ int answer() const { return answer_; }
    __device__ explicit operator bool() const { return answer_ == ONEHOP_OK; }
    __device__ Row &operator*() const { return *static_cast<Row *>(pin_.at); }
    __device__ Row *operator->() const { return static_cast<Row *>(pin_.at); }

  private:
    const onehop_array *handle_;
    onehop_pin pin_;
    int answer_;
};

} // namespace onehop

#endif

#endif
