#!/bin/bash
# A bash that keeps its state: it reads its commands from the host, one line for each turn and one that tells its end.
# Interactive, because only such a shell ends a turn that is interrupted, and nothing else.
hear() {
  trap '' INT
  while IFS= read -r line; do
    if [ "$line" = interrupt ]; then
      kill -INT 0
    else
      printf '%s\n' "$line"
    fi
  done
}
unset PROMPT_COMMAND ENV HISTFILE MAILCHECK
export -n PS1 PS2
export PS1='' PS2=''
exec bash --noprofile --norc --noediting -i < <(hear <&3) 3<&-
