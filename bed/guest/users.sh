# Shared by the jobs that use a drive and check that it is refused. Sourced by them, with VIA.

load_ways
load_ext4
within 5 drives_it "$NVME2"
d="$NVME2?via=$1"
disk=$(nvme_of "$NVME2")
mkdir -p /mnt

# refused WHAT NAME: every attempt to detach it from its driver is refused. All are made in parallel, because each waits
# two seconds for a program that has the drive open.
refused() {
    local command at=/tmp/refused- number=0 pids=
    set -- "$1" "$2" "read --lba 0 --blocks 8 -g emu -d $d" "drive bind -d $NVME2" "drive recover -d $NVME2"
    for command in "$3" "$4" "$5"; do
        number=$((number + 1))
        # shellcheck disable=SC2086
        (onehop $command >$at$number 2>&1; echo $? >$at$number.status) &
        pids="$pids $!"
    done
    # shellcheck disable=SC2086
    wait $pids
    number=0
    for command in "$3" "$4" "$5"; do
        number=$((number + 1))
        status 3 "$1: refused (${command%% -*})" sh -c "cat $at$number; exit \$(cat $at$number.status)"
        check "$1: by its name" grep -q "$2" $at$number
    done
    onehop drive list >/tmp/told
    check "$1: listed" grep -q "$2" /tmp/told
    check "$1: the kernel's driver keeps it" drives_it "$NVME2"
}

free() {
    check "$1: then it is free" onehop read --lba 0 --blocks 8 -g emu -d "$d"
    within 5 drives_it "$NVME2"
}

# Two partitions of 24 MiB.
printf 'o\nn\np\n1\n\n+24M\nn\np\n2\n\n\nw\n' | fdisk "$disk" >/tmp/said 2>&1
check "it has partitions" within 5 test -b "${disk}p2"
free "partitions"

mke2fs "${disk}p1" >/tmp/said 2>&1
check "a partition is mounted" mount -t ext4 "${disk}p1" /mnt
check "what is mounted can be written" sh -c "echo kept >/mnt/kept && sync"

# The drive is free again and has its former contents.
users_end() {
    free "after all that"
    check "and what was on it is" sh -c "mount -t ext4 ${disk}p1 /mnt && grep -q kept /mnt/kept && umount /mnt"
    kernel_has "$NVME2"
}
