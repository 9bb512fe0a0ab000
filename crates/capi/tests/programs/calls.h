/* Shared by the kernels of calls.cu and their host. */
#ifndef CALLS_H
#define CALLS_H

enum { TEST_READ, TEST_WRITE, TEST_SUBMIT_WAIT, TEST_SUBMIT_TEST, TEST_SPENT, TEST_NO_QUEUE, TEST_FACTS };

struct test_call {
    unsigned long long lba;
    unsigned long long offset;
    unsigned int blocks;
    unsigned int operation;
    unsigned int kind;
    unsigned int pad;
};

#endif
