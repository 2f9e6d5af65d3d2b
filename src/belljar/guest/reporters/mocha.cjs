// A reporter of mocha: its own `spec`, and ours beside it.
'use strict';
const path = require('node:path');
const { createRequire } = require('node:module');
const { cut, place, relative, writer } = require('./lines.cjs');

// mocha is the project's, not ours: it is found from the program that runs.
const load = createRequire(require('node:fs').realpathSync(process.argv[1]));
const Spec = load(path.join(path.dirname(load.resolve('mocha/package.json')), 'lib/reporters/spec.js'));

module.exports = class extends Spec {
    constructor(runner, options) {
        super(runner, options);
        const say = writer('mocha');
        const told = (test, outcome, error) => {
            const names = test.titlePath ? test.titlePath() : [test.title];
            const file = relative(test.file || (test.parent && test.parent.file));
            const event = { event: 'test', id: [file, ...names].join(' > '), name: names.join(' > '), file, outcome,
                seconds: typeof test.duration === 'number' ? test.duration / 1000 : null };
            if (error) {
                const text = cut(error.stack || error.message || error);
                event.message = cut(error.message || error).slice(0, 2000);
                event.traceback = text;
                event.fail_line = place(text, file)[1];
            }
            say(event);
        };
        say({ event: 'collected', count: runner.total });
        runner.on('pass', (test) => told(test, 'passed'));
        runner.on('pending', (test) => told(test, 'skipped'));
        runner.on('fail', (test, error) => told(test, test.type === 'hook' ? 'error' : 'failed', error));
        runner.on('end', () => say({ event: 'end' }));
    }
};
