// Starts with each node of a test run (NODE_OPTIONS): gives test runners our reporter beside their own, by the words that
// a user would have typed. Programs that are no test runner, and those that a test starts, go on as ever.
'use strict';
const path = require('node:path');
const fs = require('node:fs');

const out = process.env.BELLJAR_JS_OUT;
if (out) {
    const here = __dirname;
    let settings = {};
    try { settings = JSON.parse(fs.readFileSync(path.join(here, 'settings.json'), 'utf8')); } catch { /* no choice */ }
    // The name behind a link, as node_modules/.bin has them.
    let main = process.argv[1] || '';
    try { main = fs.realpathSync(main); } catch { /* none, such as `node --test` */ }
    main = main.replaceAll('\\', '/');
    const add = (...words) => process.argv.push(...words);
    const mine = () => { delete process.env.BELLJAR_JS_OUT; process.env.BELLJAR_JS_OUT_OWN = out; };
    const shard = settings.shard ? `${settings.shard[0]}/${settings.shard[1]}` : '';
    const has = (...names) => process.argv.some((word) => names.some((name) => word === name || word.startsWith(`${name}=`)));

    // The tests that were asked for: a pattern of their whole names, and their files.
    const only = settings.only && settings.only.length ? settings.only : null;
    const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
    const parts = (only || []).map((id) => id.replace(/ #\d+$/, '').split(' > '));
    const names = `^(${parts.filter((one) => one.length > 1).map((one) => one.slice(1).map(escaped).join('( > | )')).join('|')})$`;
    const files = [...new Set(parts.map((one) => one[0]).filter((one) => one))];

    if (/\/jest(-cli)?\/bin\/jest\.js$/.test(main)) {
        mine();
        if (!has('--reporters')) add('--reporters=default');
        add(`--reporters=${path.join(here, 'jest.cjs')}`, '--testLocationInResults');
        if (shard) add(`--shard=${shard}`);
        if (only) add('--testNamePattern', names, '--runTestsByPath', ...files.filter((one) => !process.argv.includes(one)));
        if (settings.coverage) add('--coverage', '--coverageReporters=json-summary', `--coverageDirectory=${out}`);
    } else if (/\/vitest\/vitest\.mjs$/.test(main)) {
        mine();
        if (!has('--reporter')) add('--reporter=default');
        add(`--reporter=${path.join(here, 'vitest.mjs')}`, '--includeTaskLocation');
        if (shard) add(`--shard=${shard}`);
        if (only) add('--testNamePattern', names, ...files.filter((one) => !process.argv.includes(one)));
        if (settings.coverage) {
            add('--coverage.enabled', '--coverage.reporter=json-summary', `--coverage.reportsDirectory=${out}/vitest`);
        }
    } else if (/\/mocha\/bin\/(_?mocha|mocha\.js|_mocha\.js)$/.test(main)) {
        // mocha may start itself once more, with these words: the second one leaves them as they are.
        process.env.BELLJAR_JS_OUT_OWN = out;
        const reporter = path.join(here, 'mocha.cjs');
        if (!process.argv.includes(reporter)) {
            add('--reporter', reporter);
            if (only) add('--grep', names);
        }
    } else if (process.execArgv.includes('--test') && !process.env.NODE_TEST_CONTEXT) {
        mine();
        const own = process.execArgv.some((word) => word.startsWith('--test-reporter'));
        const words = own ? [] : ['--test-reporter=spec', '--test-reporter-destination=stdout'];
        words.push(`--test-reporter=${path.join(here, 'node.mjs')}`);
        words.push(`--test-reporter-destination=${path.join(out, `node-${process.pid}.jsonl`)}`);
        if (shard) words.push(`--test-shard=${shard}`);
        if (settings.coverage) words.push('--experimental-test-coverage');
        const started = require('node:child_process').spawnSync(
            process.execPath, [...process.execArgv, ...words, ...process.argv.slice(1)], { stdio: 'inherit' });
        if (started.signal) process.kill(process.pid, started.signal);
        process.exit(started.status === null ? 1 : started.status);
    }
}
