/* What the kernels and the host of the pointer chase agree on. */
#ifndef POINTER_CHASE_H
#define POINTER_CHASE_H

/* The beginning of each block of the chain. */
struct chase_node {
    /* The block's own number, so that a wrong block is noticed. */
    unsigned long long self;
    /* The block to read next. */
    unsigned long long next;
    /* What it is read for. */
    unsigned long long value;
};

/* How a thread's chase ended. */
struct chase_end {
    /* The sum of all values that it read. */
    unsigned long long sum;
    /* The block that it would read next. */
    unsigned long long lba;
    /* How many it read. */
    unsigned int hops;
    /* The last answer of the queue; CHASE_WRONG_BLOCK if a block was not the one that was asked for. */
    int answer;
};

#define CHASE_WRONG_BLOCK (-1000)

#endif
