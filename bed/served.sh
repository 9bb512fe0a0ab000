# Shared by bed/vfio-user and bed/sdr, whose guests have devices that `onehop sim serve` serves. They set bed, onehop, limit
# (a guest's time limit in seconds) and, for each guest, dir.

. "$bed/kernels.sh"

work=$(mktemp -d)
# Of this shell: the guest and the servers that it waits for, and shells that do the same in parallel.
guest='' servers=() served=() running=()
finish() {
    end_guest
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    # Each stops its own guest.
    [ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP
end_guest() { [ -z "$guest" ] || kill "$guest" 2>/dev/null || true; }

sid=$("$bed/sid")
busybox=$sid/usr/bin/busybox

# modules FROM INTO NAME...: kernel modules with their dependencies, in load order.
modules() {
    local from=$1 into=$2 name line file base
    shift 2
    mkdir -p "$into"
    for name in "$@"; do
        line=$(grep -E "(^|/)$name\.ko(\.xz)?:" "$from/modules.dep" | head -n 1 || true)
        [ -n "$line" ] || continue
        for file in $(tr ' ' '\n' <<<"${line#*:}" | tac) "${line%%:*}"; do
            base=$(basename "$file" .xz)
            case $file in
            *.xz) "$busybox" xz -dc "$from/$file" >"$into/$base" ;;
            *) cp "$from/$file" "$into/$base" ;;
            esac
            echo "$name $base" >>"$into/order"
        done
    done
}

# archive DIR: a folder as a part of an initramfs. Parts can be concatenated.
archive() {
    (cd "$1" && find . | "$busybox" cpio -o -H newc 2>/dev/null)
}

# serve NAME SPEC: a server for one client; its output goes to DIR/NAME.log, its report to DIR/NAME.json.
serve() {
    local name=$1 waited=0
    "$onehop" --json sim serve -d "$2" --socket "$dir/$name.sock" --once >"$dir/$name.json" 2>"$dir/$name.log" &
    servers+=($!)
    served+=("$name")
    until [ -S "$dir/$name.sock" ]; do
        sleep 0.05
        [ $((waited += 1)) -lt 200 ] || die "no server for $name: $(cat "$dir/$name.log")"
    done
}

# boot KERNEL APPEND [QEMU-OPTION...]: the guest with all served devices; its lines go to DIR/serial, QEMU's own to
# DIR/qemu.
boot() {
    local kernel=$1 append=$2 name devices=()
    shift 2
    for name in "${served[@]}"; do
        devices+=(-device '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"'"$dir/$name.sock"'"}}')
    done
    timeout -k 5 "$limit" "$bed/sid" qemu -machine q35,kernel-irqchip=split,memory-backend=ram \
        -object memory-backend-memfd,id=ram,size=1G,share=on -accel tcg,thread=multi -cpu max -smp 4 -m 1G \
        "$@" "${devices[@]}" -kernel "$ONEHOP_BED/kernel-$kernel/vmlinuz" -initrd "$dir/initramfs" \
        -append "console=ttyS0 panic=-1 quiet $fewer $append" \
        -nodefaults -serial "file:$dir/serial" -display none -no-reboot </dev/null >"$dir/qemu" 2>&1 &
    # In this form, a signal ends the wait, and QEMU with it.
    guest=$!
    wait $guest
}

# The guest's lines, in DIR/log, and whether it ran to its end.
heard() {
    local status=$1
    tr -d '\r' <"$dir/serial" >"$dir/log" || touch "$dir/log"
    if [ "$status" != 0 ] || ! grep -q '^END' "$dir/log"; then
        echo "FAIL guest: QEMU ended with status $status, the guest $(grep -c '^END' "$dir/log") times in order"
        grep -aE 'BUG:|Oops:|Kernel panic' "$dir/log" | head -n 5 | sed 's/^/    /' || true
        tail -n 25 "$dir/log" | sed 's/^/    /'
        sed 's/^/    qemu: /' "$dir/qemu" | head -n 10
    fi
    grep -E '^(PASS|FAIL|SKIP|    )' "$dir/log" || true
}

# Each ends by itself when QEMU has ended; a server without a client does not.
end_servers() {
    local server left=100
    for server in "${servers[@]}"; do
        while kill -0 "$server" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.1; done
        kill -INT "$server" 2>/dev/null || true
        wait "$server" || true
    done
    servers=() served=()
}

passed=0 failed=0
# tell WHAT SECONDS: prints DIR/verdict and counts it.
tell() {
    local p f
    p=$(grep -c '^PASS' "$dir/verdict" || true)
    f=$(grep -c '^FAIL' "$dir/verdict" || true)
    # A run without tests proves nothing.
    [ $((p + f)) -gt 0 ] || { f=1; echo "FAIL guest: ran no test" >>"$dir/verdict"; }
    echo "== $1: $p passed, $f failed, $2 s"
    cat "$dir/verdict"
    passed=$((passed + p)) failed=$((failed + f))
}

# The last line, and the status.
result() {
    echo
    echo "test result: $([ $failed = 0 ] && echo ok || echo FAILED). $passed passed; $failed failed; 0 ignored; $SECONDS s"
    [ $failed = 0 ]
}
