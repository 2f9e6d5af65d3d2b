// Writes events, one JSON object a line, to a file of this process. What each is, `core/test_results/lines.py` says.
'use strict';
const fs = require('node:fs');
const path = require('node:path');

const LIMIT = 30000;

exports.cut = (text) => {
    const all = String(text === undefined || text === null ? '' : text).replace(/\u001b\[[0-9;]*m/g, '');
    return all.length <= LIMIT ? all : `${all.slice(0, LIMIT / 2)}\n[...]\n${all.slice(-LIMIT / 2)}`;
};

exports.relative = (file) => {
    if (!file) return '';
    const plain = String(file).startsWith('file://') ? require('node:url').fileURLToPath(String(file)) : String(file);
    const near = path.relative(process.cwd(), plain);
    return near.startsWith('..') ? '' : near;
};

// The place in a stack that is in the test's own file, or else the first in the project.
exports.place = (stack, file) => {
    const found = [...String(stack || '').matchAll(/(?:\(|at |❯ |\s)((?:file:\/\/)?[^\s():]+):(\d+):\d+/g)]
        .map((one) => [exports.relative(one[1]), Number(one[2])])
        .filter(([name]) => name && !name.includes('node_modules'));
    return found.find(([name]) => name === file) || found[0] || ['', null];
};

// The tests that were asked for alone; null: all of them.
exports.only = (() => {
    try {
        const { only } = JSON.parse(fs.readFileSync(path.join(__dirname, 'settings.json'), 'utf8'));
        return only && only.length ? new Set(only) : null;
    } catch { return null; }
})();

exports.writer = (framework) => {
    const folder = process.env.BELLJAR_JS_OUT_OWN || process.env.BELLJAR_JS_OUT;
    if (!folder) return () => {};
    const file = fs.openSync(path.join(folder, `${framework}-${process.pid}.jsonl`), 'a', 0o600);
    const seen = new Map();
    const say = (event) => {
        if (event.event === 'test') { // several tests of one name are several
            const count = (seen.get(event.id) || 0) + 1;
            seen.set(event.id, count);
            if (count > 1) event.id += ` #${count}`;
            if (event.outcome === 'skipped' && exports.only && !exports.only.has(event.id)) return; // not asked for
        }
        fs.writeSync(file, `${JSON.stringify(event)}\n`);
    };
    say({ event: 'start', framework });
    return say;
};
